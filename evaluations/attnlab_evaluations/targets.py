"""`attnlab compare --targets`: attnlab's own goals beside what users could pick instead, in one run. Needs torch.

Every ratio is paired within a round, on the same inputs in one process; start-up times are the median
of fresh Python processes. A goal is "met" where its whole 95% interval is, "missed" where none of it is,
otherwise "within noise".
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from tabulate import tabulate

import attnlab
from attnlab import InvalidInput
from attnlab_evaluations import peers, provenance, records, settings
from attnlab_evaluations.progress import Progress
from attnlab_evaluations.timing import Interval, bootstrap_median, exponent, measure, paired_ratio

CHUNKS = (64, 128, 256)
"""Chunk lengths tried for the chunked peer; attnlab is held against the fastest of the run."""


@dataclass(frozen=True)
class Target:
    """One goal: what was measured, the peer, the measured interval, its unit, and the most it may be (None: no goal)."""

    what: str
    peer: str
    found: Interval
    unit: str
    goal: float | None
    note: str = ""

    @property
    def verdict(self) -> str:
        """`met`, `missed`, `within noise`, `not measured` or `no goal`."""
        if self.goal is None:
            return "no goal"
        if math.isnan(self.found.median):
            return "not measured"
        if self.found.high <= self.goal:
            return "met"
        return "missed" if self.found.low > self.goal else "within noise"


def run_targets(args: Namespace) -> int:
    """Measure every target, print the table, write `targets.json` and `targets.md`. Returns 0, or 1 for a miss."""
    budget = settings.number("--budget", args.budget, float, 1)
    threads = None if args.threads is None else settings.number("--threads", args.threads, int, 1)
    useless = [f"--{word}" for word in ("variants", "workloads", "resume") if getattr(args, word, None)]
    if useless:
        raise InvalidInput(f"--targets: {' and '.join(useless)} has no use with it; leave it out")
    out = settings.folder(args.out)
    made = None  # a folder of this call's own making, which an interruption takes away again
    if out is not None:
        try:
            if not out.exists():
                out.mkdir(parents=True)
                made = out
        except OSError as error:
            raise InvalidInput(
                f"--out: cannot make the folder {out}: {error.strerror}; choose another"
            ) from None
    progress = Progress()
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        found = measure_targets(budget, settings.number("--seed", args.seed, int, 0, 2**32 - 1), progress.say)
        facts = provenance.collect(torch.get_num_threads())
    except KeyboardInterrupt:
        progress.done()
        if made is not None:
            made.rmdir()
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    finally:
        progress.done()
        torch.set_num_threads(before)
    data = {"targets": [{**asdict(t), "verdict": t.verdict} for t in found], "provenance": facts}
    if out is not None:
        records.write_text(out / "targets.json", json.dumps(records.clean(data), indent=1) + "\n")
        records.write_text(out / "targets.md", render(found, "github") + "\n")
    print(json.dumps(records.clean(data), indent=1) if args.form == "json" else render(found, "simple"))
    return 1 if any(t.verdict == "missed" for t in found) else 0


def render(found: list[Target], form: str) -> str:
    """The table of goals and verdicts."""
    body = [
        (
            t.what,
            t.peer,
            f"{t.found.median:.3g} [{t.found.low:.3g}, {t.found.high:.3g}] {t.unit}".strip(),
            "none" if t.goal is None else f"<= {t.goal:g} {t.unit}".strip(),
            t.verdict,
            t.note or "-",
        )
        for t in found
    ]
    header = ("target", "beside", "measured [95%]", "goal", "verdict", "note")
    return tabulate(body, headers=header, tablefmt=form, disable_numparse=True)


def measure_targets(budget: float, seed: int, say: Callable[[str], None]) -> list[Target]:
    """All rows, each within its share of `budget` seconds."""
    share = budget / 12
    found: list[Target] = []
    with torch.no_grad():
        say("dispatch")
        found.append(dispatch(share, seed))
        for length, causal, goal in ((1024, False, 1.02), (1024, True, 1.03), (4096, True, 1.03)):
            say(f"dot_product at {length}")
            found.append(against_torch(length, causal, goal, share * (3 if length > 2000 else 1), seed))
        say("linear at 4096")
        found.append(linear(4096, share * 2, seed))
        say("linear from 4k to 64k")
        found.append(linear_exponent((4096, 8192, 16384, 32768, 65536), share * 3, seed))
    say("start-up")
    found += start_up()
    return found


def dispatch(budget: float, seed: int) -> Target:
    """Microseconds that `attnlab.attention` adds to torch's function at (1, 2, 8, 16)."""
    query, key, value = _inputs(2, 8, 16)
    pair = _pair(
        lambda: attnlab.attention(query, key, value, variant="dot_product"),
        lambda: peers.torch_attention(query, key, value),
        budget,
        seed,
    )
    differences = [(a - b) * 1e6 for a, b in zip(*pair, strict=True)]
    note = f"{statistics.median(pair[0]) * 1e6:.1f} against {statistics.median(pair[1]) * 1e6:.1f} us a call"
    return Target(
        "dispatch at (1, 2, 8, 16), added", "torch", bootstrap_median(differences, seed=seed), "us", 4.0, note
    )


def against_torch(length: int, causal: bool, goal: float, budget: float, seed: int) -> Target:
    """`attnlab.attention` over torch's function, float32, (1, 8, L, 64)."""
    query, key, value = _inputs(8, length, 64)
    pair = _pair(
        lambda: attnlab.attention(query, key, value, variant="dot_product", causal=causal),
        lambda: peers.torch_attention(query, key, value, causal=causal),
        budget,
        seed,
    )
    what = f"dot_product{', causal' if causal else ''}, L={length}"
    note = f"{statistics.median(pair[0]) * 1e3:.3g} against {statistics.median(pair[1]) * 1e3:.3g} ms"
    return Target(what, "torch", paired_ratio(*pair, seed=seed), "x", goal, note)


def linear(length: int, budget: float, seed: int) -> Target:
    """The causal linear variant over the best chunk length of the chunked peer."""
    query, key, value = _inputs(8, length, 64)
    calls: dict[str, Callable[[], object]] = {
        "attnlab": lambda: attnlab.attention(query, key, value, variant="linearised", causal=True)
    }
    for chunk in CHUNKS:
        calls[f"chunk {chunk}"] = lambda c=chunk: peers.chunked_linear(query, key, value, chunk=c)  # type: ignore[misc]
    samples = measure(calls, reference="attnlab", budget=budget, seed=seed, max_rounds=60).samples
    best = min((n for n in samples if n != "attnlab"), key=lambda n: statistics.median(samples[n]))
    note = f"{statistics.median(samples['attnlab']) * 1e3:.3g} against {statistics.median(samples[best]) * 1e3:.3g} ms"
    ratio = paired_ratio(samples["attnlab"], samples[best], seed=seed)
    return Target(f"linearised, causal, L={length}", f"chunked, {best}", ratio, "x", 1.0, note)


def linear_exponent(lengths: tuple[int, ...], budget: float, seed: int) -> Target:
    """The slope of log time over log length; its interval comes from fitting each round by itself."""
    calls: dict[str, Callable[[], object]] = {}
    for length in lengths:
        inputs = _inputs(8, length, 64)
        calls[str(length)] = lambda i=inputs: attnlab.attention(*i, variant="linearised", causal=True)  # type: ignore[misc]
    samples = measure(calls, reference=str(lengths[0]), budget=budget, seed=seed).samples
    done = [n for n in lengths if str(n) in samples]
    rounds = zip(*(samples[str(n)] for n in done), strict=True)
    slopes = [s for times in rounds if (s := exponent(done, times, last=len(done))) is not None]
    times = ", ".join(f"{n}: {statistics.median(samples[str(n)]) * 1e3:.3g}" for n in done)
    what = f"linearised, causal, time exponent {done[0]} to {done[-1]}"
    return Target(what, "linear: 1", bootstrap_median(slopes, seed=seed), "", 1.1, f"ms: {times}")


def start_up(repeats: int = 7) -> list[Target]:
    """`import attnlab` beyond torch, and `attnlab list`, each in fresh processes."""
    timed = "import torch, time; t = time.perf_counter(); {}; print(time.perf_counter() - t)"
    every = "import attnlab; [getattr(attnlab, n) for n in attnlab.__all__]"
    imports = [float(_python("-c", timed.format("import attnlab"))) for _ in range(repeats)]
    uses = [float(_python("-c", timed.format(every))) for _ in range(repeats)]
    listing = []
    for _ in range(repeats):
        began = time.perf_counter()
        _python("-m", "attnlab", "list")
        listing.append(time.perf_counter() - began)
    script = "import sys; from attnlab.cli import main; main(['list']); print('torch' in sys.modules)"
    loaded = _python("-c", script).split()[-1] == "True"
    heavy = Interval(*[float(loaded)] * 3)
    return [
        Target("import attnlab beyond import torch", "torch", bootstrap_median(imports), "s", 0.1),
        Target("every public name beyond import torch", "torch", bootstrap_median(uses), "s", None),
        Target("attnlab list", "-", bootstrap_median(listing), "s", 0.3),
        Target("attnlab list imports torch (1: yes)", "-", heavy, "", 0.0),
    ]


def _pair(
    ours: Callable[[], object], theirs: Callable[[], object], budget: float, seed: int
) -> tuple[list[float], list[float]]:
    for call in (ours, theirs):
        call()  # imports and first instances belong to no round
    found = measure(
        {"theirs": theirs, "ours": ours},
        reference="theirs",
        always=["ours"],
        budget=budget,
        seed=seed,
        max_rounds=200,
    )
    if found.failed:
        raise next(iter(found.failed.values()))
    if "ours" not in found.samples:
        return [math.nan], [math.nan]
    return found.samples["ours"], found.samples["theirs"]


def _inputs(heads: int, length: int, width: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    return tuple(torch.randn(1, heads, length, width, generator=generator) for _ in range(3))


def _python(*words: str) -> str:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.strip()
