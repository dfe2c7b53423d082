"""The house: imports point one way, heavy libraries stay out of the way, every column has a home."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

from features.vocabulary import COLUMNS, TABLES

ROOT = Path(__file__).parent.parent
LAYERS = {
    "features": set(),
    "models": {"features"},
    "scheduler_hints": {"models", "features"},
    "dashboards": {"models", "features"},
    "pipelines": {"scheduler_hints", "dashboards", "models", "features"},
    "simulator": {"features"},
}
OURS = {*LAYERS, "weatherglass", "tests", "benchmarks"}
MAY_USE_SIMULATOR = {"weatherglass.py", "pipelines/supervisor.py"}


@functools.cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a module's syntax tree, the module itself first."""
    return tuple(ast.walk(ast.parse(path.read_text())))


@functools.cache
def _imports(path: Path) -> set[str]:
    found = set()
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
    return found


def _modules(layer: str) -> list[Path]:
    return sorted((ROOT / layer).rglob("*.py"))


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_one_way(layer):
    allowed = LAYERS[layer] | {layer}
    for path in _modules(layer):
        name = str(path.relative_to(ROOT))
        for module in _imports(path):
            top = module.split(".")[0]
            if top == "simulator" and name in MAY_USE_SIMULATOR:
                continue
            assert top not in OURS - allowed, f"{name} imports {module}; {layer} may import {sorted(allowed)}"


@pytest.mark.parametrize("layer", ["features", "models", "scheduler_hints", "dashboards"])
def test_dagster_stays_at_the_edge(layer):
    for path in _modules(layer):
        assert not any(m.split(".")[0].startswith("dagster") for m in _imports(path)), f"{path} imports dagster"


def test_features_do_no_input_or_output():
    banned = {"socket", "requests", "httpx", "duckdb", "subprocess", "pathlib", "os", "urllib"}
    for path in _modules("features"):
        wrong = {m.split(".")[0] for m in _imports(path)} & banned
        assert not wrong, f"{path} imports {wrong}: features are pure functions of frames"


def test_every_module_says_what_belongs_in_it():
    for layer in (*LAYERS, "benchmarks"):
        for path in _modules(layer):
            doc = ast.get_docstring(ast.parse(path.read_text()))
            assert doc, f"{path} has no module docstring"


def test_tables_use_registry_columns_and_are_keyed():
    for table in TABLES.values():
        for name in (*table.columns, *table.key, *table.sort, table.time):
            assert name in COLUMNS, f"{table.name}.{name} is not in the registry"
        assert set(table.key) | {table.time} <= set(table.columns), table.name
        assert table.description


def test_every_column_is_documented_and_used():
    used = {name for table in TABLES.values() for name in table.columns}
    for column in COLUMNS.values():
        assert column.description, column.name
        assert column.name in used, f"{column.name} is in no table"


def test_no_pickle_and_no_eval():
    for path in ROOT.rglob("*.py"):
        if ".venv" in path.parts:
            continue
        names = {m.split(".")[0] for m in _imports(path)}
        assert not names & {"pickle", "cloudpickle", "dill", "joblib"}, path
        for node in _nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec"}, f"{path}:{node.lineno}"


def test_help_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from weatherglass import cli\n"
        "assert CliRunner().invoke(cli, ['--help']).exit_code == 0\n"
        "heavy = {'polars', 'numpy', 'duckdb', 'dagster', 'lightgbm', 'sklearn', 'plotly', 'dash', 'pydantic'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
