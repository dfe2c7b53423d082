"""What the memory commands print: the estimate of a training job, and how much of their GPUs' memory jobs used.

No formulas here: `models/memory.py` and `features/memory_use.py` have them.
"""

from __future__ import annotations

from models.memory_inputs import GIB, Training
from scheduler_hints.memory_estimates import MemoryEstimate, memory_answer


def print_estimate(training: Training, capacity_bytes: int | None, *, as_json: bool = False) -> bool:
    """Print the device memory of a training job.

    Args:
        training: The job.
        capacity_bytes: Memory of one GPU, bytes; None: not compared.
        as_json: Print JSON, the same as the API's.

    Returns:
        Whether it fits; True where no GPU was given.
    """
    answer = memory_answer(training, capacity_bytes)
    if as_json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())
    else:
        print("\n".join(estimate_lines(answer, training)))
    return answer.fits is not False


def estimate_lines(answer: MemoryEstimate, training: Training) -> list[str]:
    """The estimate as lines of text."""
    stage = "" if training.pipeline_parallel == 1 else f", pipeline stage {answer.stage + 1} the fullest"
    gpus = "1 GPU" if answer.gpus == 1 else f"{answer.gpus:,} GPUs"
    out = [f"{answer.parameters / 1e9:.3g} billion parameters on {gpus}; one GPU of them{stage}:", ""]
    out += [f"  {line.name:<24} {line.bytes / GIB:>9.2f} GiB   {line.source}" for line in answer.lines]
    out += [f"  {'in all':<24} {answer.total_bytes / GIB:>9.2f} GiB", ""]
    smallest = answer.smallest_gpu_gib
    holds = f"smallest usual GPU that holds it: {smallest} GiB" if smallest else "no GPU that there is holds it"
    if answer.fits is None or answer.gpu_memory_bytes is None or answer.headroom_bytes is None:
        return [*out, holds]
    capacity = f"{answer.gpu_memory_bytes / GIB:.4g} GiB"
    if answer.fits:
        return [*out, f"fits {capacity}, {answer.headroom_bytes / GIB:.2f} GiB to spare; {holds}"]
    out.append(f"does not fit {capacity}: {-answer.headroom_bytes / GIB:.2f} GiB too much; {holds}")
    if not answer.changes:
        return [*out, "nothing that is known here would make it smaller"]
    width = max(len(change.change) for change in answer.changes)
    out.append("what each change would give:")
    for change in answer.changes:
        fate = "fits" if change.fits else "too much still"
        out.append(f"  {change.change:<{width}}  {change.total_bytes / GIB:>9.2f} GiB on {change.gpus:,} GPUs   {fate}")
    if not any(change.fits for change in answer.changes):
        out.append("no combination of them fits: more GPUs, a smaller model or shorter sequences are needed")
    return out
