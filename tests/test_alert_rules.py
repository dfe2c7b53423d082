"""Alert rules as shipped: promtool takes them, their own tests hold, and they select what the hints API shows."""

import re
import subprocess

import pytest

from scheduler_hints.gauges import gauges_of, render
from tests.hints_support import ROOT, bottleneck

ALERTS = ROOT / "deploy" / "alerts"
RULES = ALERTS / "weatherglass.rules.yml"


@pytest.mark.services("promtool")
@pytest.mark.parametrize("asked", [("check", "rules", RULES.name), ("test", "rules", "weatherglass.test.yml")])
def test_promtool_takes_the_rules_and_their_tests_hold(asked):
    done = subprocess.run(["promtool", *asked], cwd=ALERTS, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


def test_only_one_rule_pages_and_it_asks_for_what_hints_call_a_page():
    rules = re.split(r"\n\s+- alert: ", RULES.read_text())[1:]
    paging = [rule for rule in rules if re.search(r"^\s+severity: page$", rule, re.MULTILINE)]
    assert len(rules) == 6
    assert [rule.split()[0] for rule in paging] == ["BottleneckNeedsSomeoneNow"]
    (rule,) = paging
    asked = re.findall(r'(weatherglass_\w+)\{severity="(\w+)"\}', rule)
    assert asked == [("weatherglass_bottleneck_active", "page"), ("weatherglass_bottleneck_probability", "page")]
    hints = [
        bottleneck("b1", severity="page", scope="rack", node=None, gpu_uuid=None),
        bottleneck("b2", severity="page", scope="pod", node=None, gpu_uuid=None, is_active=True),
        bottleneck("b3", severity="info"),
        bottleneck("b4", severity="page", scope="cluster", node=None, gpu_uuid=None, silenced_by="si-1"),
    ]
    text, _ = render([gauges_of("bottlenecks", "alpha", hints)])
    assert sorted(line.split("{")[0] for line in text.splitlines() if 'severity="page"' in line) == [
        "weatherglass_bottleneck_active", "weatherglass_bottleneck_probability",
    ]  # fmt: skip


def test_every_metric_that_rules_name_is_documented():
    named = set(re.findall(r"weatherglass_\w+", RULES.read_text()))
    documented = (ROOT / "docs" / "api.md").read_text()
    assert not {name for name in named if name not in documented}
