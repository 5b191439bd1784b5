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
from collections.abc import Callable
from dataclasses import asdict

import torch
from tabulate import tabulate

import attnlab
from attnlab import PluginError
from attnlab.integrations.torch_mha import MultiheadAttention
from attnlab_evaluations.frame import folders, provenance, records
from attnlab_evaluations.frame.progress import Progress
from attnlab_evaluations.measure.timing import Interval, exponent, median_interval, paired_ratio
from attnlab_evaluations.report import layout
from attnlab_evaluations.report.tables import level_text
from attnlab_evaluations.tasks.compare.settings import TargetSettings
from attnlab_evaluations.tasks.targets import peers
from attnlab_evaluations.tasks.targets.additive import additive_goals
from attnlab_evaluations.tasks.targets.goals import NO_TIME, UNMEASURED, Target, random_inputs, time_calls, time_pair
from attnlab_evaluations.tasks.targets.interface import interface_goals
from attnlab_evaluations.tasks.targets.recurrence import recurrence_goals

CHUNKS = (64, 128, 256)
"""Chunk lengths tried for the chunked peer; attnlab is held against the fastest of the run."""


def run_targets(settings: TargetSettings) -> int:
    """Measure every target, print the table, write `targets.json` and `targets.md`. Returns 0, or 1 for a miss."""
    made = folders.make(settings.out) if settings.out is not None else []
    progress = Progress()
    before = torch.get_num_threads()
    try:
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        result = measure_targets(settings.budget, settings.seed, progress.say)
        facts = provenance.collect(torch.get_num_threads())
        data = {"targets": [{**asdict(t), "verdict": t.verdict} for t in result], "provenance": facts}
        text = json.dumps(records.clean(data), indent=1)
        if settings.out is not None:
            records.write_text(settings.out / "targets.json", text + "\n")
            records.write_text(settings.out / "targets.md", render(result, "github") + "\n")
    except KeyboardInterrupt:
        progress.done()
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    finally:
        progress.done()
        torch.set_num_threads(before)
        folders.unmake(made)  # it stays where it holds the files
    print(text if settings.form == "json" else render(result, "terminal"))
    return 1 if any(t.verdict == "missed" for t in result) else 0


def render(found: list[Target], form: str) -> str:
    """The table of goals and verdicts."""
    body = [
        (
            t.what,
            t.peer,
            _measured(t),
            "none" if t.goal is None else f"<= {t.goal:g} {t.unit}".strip(),
            t.verdict,
            t.note or "-",
        )
        for t in found
    ]
    header = ("target", "beside", "measured [95%]", "goal", "verdict", "note")
    if form == "terminal":
        return layout.table(header, body, groups=(0, 0, 0, 0, 1))
    return tabulate(body, headers=header, tablefmt=form, disable_numparse=True)


def _measured(target: Target) -> str:
    result = target.ratio
    if math.isnan(result.median):
        return "none"
    interval = f"[{result.low:.3g}, {result.high:.3g}]{level_text(result.level)}"
    return f"{result.median:.3g} {interval} {target.unit}".strip()


def measure_targets(budget: float, seed: int, say: Callable[[str], None]) -> list[Target]:
    """All rows, each within its share of `budget` seconds."""
    share = budget / 30
    results: list[Target] = []
    with torch.no_grad():
        say("dispatch")
        results.append(dispatch(share, seed))
        results += modules(share, seed)
        results += interface_goals(share, seed, say)
        for length, causal, goal in ((1024, False, 1.02), (1024, True, 1.03), (4096, True, 1.03)):
            say(f"dot_product at {length}")
            results.append(against_torch(length, causal, goal, share * (3 if length > 2000 else 1), seed))
        say("linear at 4096")
        results.append(linear(4096, share * 2, seed))
        say("linear from 4k to 64k")
        results.append(time_exponent("linearised", (4096, 8192, 16384, 32768, 65536), share * 3, seed))
        say("window at 4096")
        results.append(window(4096, 256, share * 2, seed))
        for heads, width, length in ((8, 64, 1024), (8, 64, 16384), (32, 128, 1024), (32, 128, 4096)):
            say(f"decoding at {length}, {heads} heads")
            results.append(decoding(heads, length, width, share, seed))
        say("window from 4k to 32k")
        results.append(time_exponent("sliding_window", (4096, 8192, 16384, 32768), share * 2, seed))
        results += recurrence_goals(share * 3, seed, say)
    results += additive_goals(share * 8, budget, seed, say)
    say("start-up")
    results += start_up()
    return results


def dispatch(budget: float, seed: int) -> Target:
    """Microseconds that `attnlab.attention` adds to torch's function at (1, 2, 8, 16)."""
    query, key, value = random_inputs(2, 8, 16)
    pair = time_pair(
        lambda: attnlab.attention(query, key, value, variant="dot_product"),
        lambda: peers.torch_attention(query, key, value),
        budget,
        seed,
    )
    what = "dispatch at (1, 2, 8, 16), added"
    if pair is None:
        return Target(what, "torch", UNMEASURED, "us", 4.0, NO_TIME)
    differences = [(a - b) * 1e6 for a, b in zip(*pair, strict=True)]
    note = f"{statistics.median(pair[0]) * 1e6:.1f} against {statistics.median(pair[1]) * 1e6:.1f} us a call"
    return Target(what, "torch", median_interval(differences), "us", 4.0, note)


def modules(budget: float, seed: int) -> list[Target]:
    """`MultiHeadAttention`, and the drop-in for torch's module, over `nn.MultiheadAttention`: (1, 16, 32), 2 heads, eval, no weights."""
    torchs = torch.nn.MultiheadAttention(32, 2, batch_first=True).eval()
    ours = attnlab.MultiHeadAttention(32, 2).eval()
    drop_in = MultiheadAttention.from_torch(torchs).eval()
    tokens = torch.randn(1, 16, 32, generator=torch.Generator().manual_seed(seed))
    calls: dict[str, Callable[[], object]] = {
        "MultiHeadAttention": lambda: ours(tokens),
        "the drop-in": lambda: drop_in(tokens, tokens, tokens, need_weights=False),
    }
    results = []
    for name, call in calls.items():
        pair = time_pair(call, lambda: torchs(tokens, tokens, tokens, need_weights=False), budget, seed)
        what = f"{name}, (1, 16, 32), 2 heads"
        if pair is None:
            results.append(Target(what, "nn.MultiheadAttention", UNMEASURED, "x", 1.3, NO_TIME))
            continue
        note = f"{statistics.median(pair[0]) * 1e6:.1f} against {statistics.median(pair[1]) * 1e6:.1f} us a call"
        results.append(Target(what, "nn.MultiheadAttention", paired_ratio(*pair), "x", 1.3, note))
    return results


def against_torch(length: int, causal: bool, goal: float, budget: float, seed: int) -> Target:
    """`attnlab.attention` over torch's function, float32, (1, 8, L, 64)."""
    query, key, value = random_inputs(8, length, 64)
    pair = time_pair(
        lambda: attnlab.attention(query, key, value, variant="dot_product", causal=causal),
        lambda: peers.torch_attention(query, key, value, causal=causal),
        budget,
        seed,
    )
    what = f"dot_product{', causal' if causal else ''}, L={length}"
    if pair is None:
        return Target(what, "torch", UNMEASURED, "x", goal, NO_TIME)
    note = f"{statistics.median(pair[0]) * 1e3:.3g} against {statistics.median(pair[1]) * 1e3:.3g} ms"
    return Target(what, "torch", paired_ratio(*pair), "x", goal, note)


def linear(length: int, budget: float, seed: int) -> Target:
    """The causal linear variant over the best chunk length of the chunked peer."""
    query, key, value = random_inputs(8, length, 64)
    calls: dict[str, Callable[[], object]] = {
        "attnlab": lambda: attnlab.attention(query, key, value, variant="linearised", causal=True)
    }
    for chunk in CHUNKS:
        calls[f"chunk {chunk}"] = lambda c=chunk: peers.chunked_linear(query, key, value, chunk=c)  # type: ignore[misc]
    samples = time_calls(calls, "attnlab", budget, seed, max_rounds=60)
    what = f"linearised, causal, L={length}"
    if len(samples) < len(calls):  # beside the fastest of the peers, or not at all
        return Target(what, "chunked", UNMEASURED, "x", 1.0, NO_TIME)
    best = min((n for n in samples if n != "attnlab"), key=lambda n: statistics.median(samples[n]))
    note = f"{statistics.median(samples['attnlab']) * 1e3:.3g} against {statistics.median(samples[best]) * 1e3:.3g} ms"
    ratio = paired_ratio(samples["attnlab"], samples[best])
    return Target(what, f"chunked, {best}", ratio, "x", 1.0, note)


def window(length: int, size: int, budget: float, seed: int) -> Target:
    """A causal window of `size` keys over torch's function with the dense mask of the same window."""
    inputs = random_inputs(8, length, 64)
    at = torch.arange(inputs[0].shape[2])
    apart = at[:, None] - at
    mask = (apart >= 0) & (apart < size)
    pair = time_pair(
        lambda: attnlab.attention(*inputs, window=(size - 1, 0)),
        lambda: peers.torch_attention(*inputs, mask=mask),
        budget,
        seed,
    )
    what, peer = f"window {size}, L={length}", "torch, dense mask"
    if pair is None:
        return Target(what, peer, UNMEASURED, "x", 1 / 8, NO_TIME)
    note = f"{statistics.median(pair[0]) * 1e3:.3g} against {statistics.median(pair[1]) * 1e3:.3g} ms"
    return Target(what, peer, paired_ratio(*pair), "x", 1 / 8, note)


def decoding(heads: int, length: int, width: int, budget: float, seed: int) -> Target:
    """One token against a cache of `length` tokens over torch's function with the same cache, (1, H, L, D): both write it, then ask."""
    steps = 64  # then both begin again, so that neither is further on than the other for long
    query, key, value = random_inputs(heads, length, width)
    _, heads, length, width = query.shape
    variant = attnlab.create("dot_product", num_heads=heads, head_dim=width)
    token = [x[:, :, :1].contiguous() for x in (query, key, value)]
    states = [variant(query, key, value, causal=True, state=variant.init_state(1, length + steps)).state]
    store = [torch.zeros(1, heads, length + steps, width) for _ in range(2)]
    for kept, inputs in zip(store, (key, value), strict=True):
        kept[:, :, :length] = inputs
    at = [length]

    def ours() -> object:
        answer = variant(*token, causal=True, state=states[-1])
        states[-1] = answer.state if answer.state.length < length + steps else answer.state.crop(length)
        return answer.out

    def theirs() -> object:
        end = at[0] + 1
        for kept, inputs in zip(store, token[1:], strict=True):
            kept[:, :, at[0] : end] = inputs
        at[0] = end if end < length + steps else length
        return peers.torch_attention(token[0], store[0][:, :, :end], store[1][:, :, :end])

    pair = time_pair(ours, theirs, budget, seed)
    what = f"dot_product, one token decoded, (1, {heads}, {length}, {width})"
    if pair is None:
        return Target(what, "torch, same cache", UNMEASURED, "x", 1.05, NO_TIME)
    note = f"{statistics.median(pair[0]) * 1e6:.4g} against {statistics.median(pair[1]) * 1e6:.4g} us"
    return Target(what, "torch, same cache", paired_ratio(*pair), "x", 1.05, note)


def time_exponent(variant: str, lengths: tuple[int, ...], budget: float, seed: int) -> Target:
    """The slope of log time over log length; its interval comes from fitting each round by itself."""
    calls: dict[str, Callable[[], object]] = {}
    for length in lengths:
        inputs = random_inputs(8, length, 64)
        calls[str(length)] = lambda i=inputs: attnlab.attention(*i, variant=variant, causal=True)  # type: ignore[misc]
    samples = time_calls(calls, str(lengths[0]), budget, seed)
    done = [n for n in lengths if str(n) in samples]
    rounds = zip(*(samples[str(n)] for n in done), strict=True)
    slopes = [s for times in rounds if (s := exponent(done, times, last=len(done))) is not None]
    if len(done) < len(lengths) or not slopes:  # over fewer lengths it would be another number
        return Target(f"{variant}, causal, time exponent", "linear: 1", UNMEASURED, "", 1.1, NO_TIME)
    times = ", ".join(f"{n}: {statistics.median(samples[str(n)]) * 1e3:.3g}" for n in done)
    what = f"{variant}, causal, time exponent {done[0]} to {done[-1]}"
    return Target(what, "linear: 1", median_interval(slopes), "", 1.1, f"ms: {times}")


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
        Target("import attnlab beyond import torch", "torch", median_interval(imports), "s", 0.1),
        Target("every public name beyond import torch", "torch", median_interval(uses), "s", None),
        Target("attnlab list", "-", median_interval(listing), "s", 0.3),
        Target("attnlab list imports torch (1: yes)", "-", heavy, "", 0.0),
    ]


def _python(*words: str) -> str:
    """What a fresh Python prints; `PluginError` with its last words where it fails."""
    try:
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PluginError(f"--targets: a fresh Python did not run: {error}") from None
    if done.returncode != 0:
        statement = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise PluginError(f"--targets: a fresh Python failed at start-up: {statement[-1]}")
    return done.stdout.strip()
