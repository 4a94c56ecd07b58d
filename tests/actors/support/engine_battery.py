"""Checks that every engine must pass, called by `test_engine_vllm.py` and `test_engine_torch.py`.

Tolerance: float32 against float32 in another order of summation. Sharp random weights make
differences of 1e-5 nats; a stale matrix or a wrong position makes more than 0.1.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain, islice, repeat

import pytest
import torch

from actors.engine.engine import Delta, StagedWeights
from actors.engine.turns import StopStrings
from buffer.record.episode import VersionSpan
from configs.errors import SettingsError, WeightsError, WeightsOverwritten
from tests.actors.support.engine_probe import Bench, Transcript
from tests.actors.support.tiny_model import reference_logprobs
from tests.waiting import until

TOLERANCE = 1e-4


async def rest() -> None:
    """Leave the engine idle for a while: it hands the very first tokens after that over at once."""
    await asyncio.sleep(0.3)


async def swaps_under_load(bench: Bench) -> None:
    """After each of three swaps with requests in flight, mu is its version's forward pass."""
    ratios = []
    for _ in range(3):
        await rest()
        long = bench.submit(*[bench.request(max_tokens=60) for _ in range(8)])
        await bench.read(lambda t=long: all(x.token_ids for x in t))  # type: ignore[misc]

        staged = bench.stage_next()
        pause_s = await bench.engine.apply(staged)

        assert bench.engine.version == staged.manifest.version
        assert 0 < pause_s < 5
        await probe_agrees(bench)
        fresh = bench.submit(
            *[bench.request(max_tokens=9, temperature=t) for t in (1.0, 0.7) for _ in range(6)]
        )
        await bench.finish(long + fresh)
        for transcript in fresh:
            assert transcript.versions == [VersionSpan(staged.manifest.version, 0)]
            ratios.append(bench.log_ratio(transcript))
    log_ratio = torch.cat(ratios)
    assert log_ratio.abs().max() < TOLERANCE
    assert log_ratio.exp().mean() == pytest.approx(1.0, abs=1e-3)


async def probe_agrees(bench: Bench) -> None:
    token_ids = bench.prompt(40)
    answer = torch.tensor(await bench.engine.probe(token_ids))
    newest = bench.models[bench.engine.version]
    assert (answer - reference_logprobs(newest, list(token_ids))).abs().max() < TOLERANCE


async def switch_at_one_token(bench: Bench) -> None:
    """In flight over a swap: a span for each version, the switch where the policy changed."""
    before, staged = bench.engine.version, bench.stage_next()
    await rest()
    transcripts = bench.submit(*[bench.request(max_tokens=200, temperature=0.7) for _ in range(6)])
    await bench.read(lambda: all(t.token_ids for t in transcripts))

    await bench.engine.apply(staged)
    await bench.finish(transcripts)

    first_of_new = []
    for transcript in transcripts:
        assert [span.version for span in transcript.versions] == [before, bench.engine.version]
        switch = transcript.versions[1].start
        assert 1 <= switch < 200
        ids = list(transcript.request.token_ids) + transcript.token_ids
        first = len(transcript.request.token_ids) - 1
        old = reference_logprobs(bench.models[before], ids, temperature=0.7)[first:]
        gap = (old - torch.tensor(transcript.logprobs)).abs()
        assert gap[:switch].max() < TOLERANCE
        first_of_new.append(float(gap[switch]))
    # One token may be as likely under both policies; most are not.
    assert statistics.median(first_of_new) > 10 * TOLERANCE


async def after_a_swap(bench: Bench) -> torch.Tensor:
    """Swap in the midst of requests, and compare their later tokens with the new policy alone.

    A swap is prepared beside the steps, and a core in a process of its own may be many steps ahead
    of who asks for one. So requests end at different times, each is followed by another until the
    swap is done, and one that found fewer than eight under way is followed by another swap.

    Returns:
        Differences to its forward pass over the whole sequence, nats, at the first eight tokens.
    """
    gaps: list[torch.Tensor] = []
    for _ in range(5):
        if len(gaps) < 8:
            gaps += await _gaps_of_a_swap(bench)
    assert len(gaps) >= 8
    return torch.cat(gaps)


async def _gaps_of_a_swap(bench: Bench) -> list[torch.Tensor]:
    before, staged = bench.engine.version, bench.stage_next()
    await rest()
    lengths = chain(range(20, 170, 5), repeat(150))
    transcripts: list[Transcript] = []

    def keep_busy() -> None:
        num_ended = sum(t.finish_reason is not None for t in transcripts)
        for length in islice(lengths, 30 + num_ended - len(transcripts)):
            transcripts.extend(bench.submit(bench.request(max_tokens=length, temperature=0.7)))

    keep_busy()
    await bench.read(lambda: sum(bool(t.token_ids) for t in transcripts) >= 8)

    swap = asyncio.create_task(bench.engine.apply(staged))

    def is_swapped() -> bool:
        keep_busy()
        return swap.done()

    await bench.read(is_swapped)
    await swap
    await bench.finish(transcripts)

    gaps = []
    for transcript in transcripts:
        wanted = transcript.request.max_tokens
        assert len(transcript.token_ids) == len(transcript.logprobs) == wanted, "no token is lost"
        if [span.version for span in transcript.versions] != [before, bench.engine.version]:
            continue  # it waited for a row, or ended before, or began after
        switch = transcript.versions[1].start
        ids = list(transcript.request.token_ids) + transcript.token_ids
        first = len(transcript.request.token_ids) - 1
        made = torch.tensor(transcript.logprobs)
        old, new = (
            reference_logprobs(bench.models[version], ids, temperature=0.7)[first:]
            for version in (before, bench.engine.version)
        )
        assert (old - made)[:switch].abs().max() < TOLERANCE, "tokens of before stay as they were"
        gaps.append((new - made)[switch : switch + 8].abs())
    return gaps


async def keeps_kv(bench: Bench) -> None:
    """Later tokens see keys and values of the old weights, and say so in their log-probs."""
    assert (await after_a_swap(bench)).median() > 10 * TOLERANCE


async def recomputes_kv(bench: Bench) -> None:
    """Later tokens are the new policy's alone, as after a fresh prefill."""
    assert (await after_a_swap(bench)).max() < TOLERANCE
    assert (await after_a_swap(bench)).max() < TOLERANCE


async def queued_requests_start_fresh(bench: Bench) -> None:
    """Requests without a token at the swap are wholly of the new version."""
    shared = bench.prompt(140)  # a full block of vLLM's prefix cache
    first = bench.submit(bench.request(max_tokens=3, token_ids=shared))
    await bench.finish(first)

    held, gate = threading.Event(), threading.Event()
    bench.engine._commands.put(partial(_hold, held, gate))
    await asyncio.to_thread(held.wait, 30)  # what follows is obeyed between the same two steps
    late = bench.submit(*[bench.request(max_tokens=5, token_ids=shared) for _ in range(3)])
    staged = bench.stage_next()
    swap = asyncio.create_task(bench.engine.apply(staged))
    await until(  # it is being prepared beside the steps
        lambda: bench.engine._commands.qsize() == len(late) + 1
    )
    gate.set()
    await swap
    await bench.finish(late)

    for transcript in late:
        assert transcript.versions == [VersionSpan(staged.manifest.version, 0)]
        assert bench.log_ratio(transcript).abs().max() < TOLERANCE


async def overflow_starts_fresh(bench: Bench) -> None:
    """With more requests than rows, those that wait at the swap are wholly of the new version."""
    await rest()
    transcripts = bench.submit(*[bench.request(max_tokens=20) for _ in range(80)])
    await bench.read(lambda: any(t.token_ids for t in transcripts))

    staged = bench.stage_next()
    await bench.engine.apply(staged)
    await bench.finish(transcripts)

    new = [t for t in transcripts if t.versions[0].version == staged.manifest.version]
    assert len(new) >= 16
    for transcript in new:
        assert bench.log_ratio(transcript).abs().max() < TOLERANCE


async def resumes(bench: Bench) -> None:
    """Prompt and partial completion as one context go on with the right log-probs."""
    (partial,) = bench.submit(bench.request(max_tokens=20))
    await bench.finish([partial])

    context = partial.request.token_ids + tuple(partial.token_ids)
    (rest,) = bench.submit(bench.request(max_tokens=20, token_ids=context))
    await bench.finish([rest])

    assert len(rest.token_ids) == 20
    assert bench.log_ratio(rest).abs().max() < TOLERANCE


async def ends(bench: Bench) -> None:
    """By a stop token, which is part of the output; by length; by the room left."""
    every = tuple(range(0, 64, 2))
    stopped = bench.submit(*[bench.request(max_tokens=100, stop=every) for _ in range(4)])
    (short,) = bench.submit(bench.request(max_tokens=1))
    (full,) = bench.submit(bench.request(max_tokens=99, token_ids=bench.prompt(250)))
    await bench.finish([*stopped, short, full])

    for transcript in stopped:
        assert transcript.finish_reason == "stop"
        assert transcript.token_ids[-1] % 2 == 0
        assert all(token % 2 for token in transcript.token_ids[:-1])
    assert (short.finish_reason, len(short.token_ids)) == ("length", 1)
    assert (full.finish_reason, len(full.token_ids)) == ("length", 6)


async def ends_by_a_string(bench: Bench) -> None:
    """With the token that completes it, be it begun in an earlier part of the turn."""
    stops = StopStrings(["abc", "dd"], lambda ids: "".join("abcdefgh"[i % 8] for i in ids))
    begun = (*bench.prompt(20), 8, 9)
    requests = [bench.request(max_tokens=100) for _ in range(8)]
    requests += [bench.request(max_tokens=100, token_ids=begun) for _ in range(8)]
    transcripts = bench.submit(
        *[replace(r, stop_strings=stops, turn=begun[-2:]) for r in requests[8:]],
        *[replace(r, stop_strings=stops) for r in requests[:8]],
    )
    await bench.finish(transcripts)
    await bench.finish(bench.submit(bench.request(max_tokens=5)))  # the engine goes on

    for transcript in transcripts:
        turn = [*transcript.request.turn, *transcript.token_ids]
        ended = stops.find_end(turn, len(transcript.request.turn))
        assert ended == (len(turn) if transcript.finish_reason == "stop" else None)
        assert bench.log_ratio(transcript).abs().max() < TOLERANCE
    assert sum(transcript.finish_reason == "stop" for transcript in transcripts) >= 8


async def end_of_text_is_no_stop(bench: Bench) -> None:
    """Only the request says where it ends, not the model's end-of-text token (1)."""
    transcripts = bench.submit(*[bench.request(max_tokens=60) for _ in range(24)])
    await bench.finish(transcripts)

    assert any(1 in transcript.token_ids for transcript in transcripts)
    assert {transcript.finish_reason for transcript in transcripts} == {"length"}


async def greedy(bench: Bench) -> None:
    """Temperature 0 takes the likeliest token each time, and says its log-prob at temperature 1."""
    (transcript,) = bench.submit(bench.request(max_tokens=25, temperature=0.0))
    await bench.finish([transcript])

    ids = torch.tensor([list(transcript.request.token_ids) + transcript.token_ids])
    with torch.no_grad():
        logits = bench.models[bench.engine.version](ids).logits[0]
    first = len(transcript.request.token_ids) - 1
    assert logits[first:-1].argmax(-1).tolist() == transcript.token_ids
    assert bench.log_ratio(transcript).abs().max() < TOLERANCE


async def aborts(bench: Bench) -> None:
    """After an abort no delta of the request comes; others go on; its id may be used again."""
    await rest()
    doomed, kept = bench.submit(bench.request(max_tokens=120), bench.request(max_tokens=60))
    await bench.read(lambda: bool(doomed.token_ids))
    held = len(doomed.token_ids)

    bench.engine.abort([doomed.request.request_id, "never seen"])
    await bench.finish([kept])
    assert len(doomed.token_ids) == held

    again = bench.submit(doomed.request)
    await bench.finish(again)
    assert len(again[0].token_ids) == 120
    assert bench.log_ratio(again[0]).abs().max() < TOLERANCE


async def halts_with_every_token(bench: Bench) -> None:
    """A halt returns all that was made: the engine made nothing that nobody got."""
    await rest()
    transcripts = bench.submit(*[bench.request(max_tokens=200) for _ in range(4)])
    await bench.read(lambda: all(transcript.token_ids for transcript in transcripts))
    held = [len(transcript.token_ids) for transcript in transcripts]
    await asyncio.sleep(0.1)  # steps go on; a running request is handed over every 0.25 s

    bench.note(await bench.engine.halt())

    gained = [len(t.token_ids) - n for t, n in zip(transcripts, held, strict=True)]
    assert all(gained), "tokens made since the last hand-over"
    for transcript in transcripts:
        assert bench.log_ratio(transcript).abs().max() < TOLERANCE
        going_on = bench.request(
            max_tokens=3,
            token_ids=transcript.request.token_ids + tuple(transcript.token_ids),
        )
        await bench.finish(bench.submit(going_on))
    assert await bench.engine.halt() == []


async def keeps_the_loop_free(bench: Bench) -> None:
    """While 64 requests run, the event loop turns about as often as one that has no engine."""
    transcripts = bench.submit(*[bench.request(max_tokens=60) for _ in range(64)])
    reading = asyncio.create_task(bench.finish(transcripts))
    with ThreadPoolExecutor(1) as beside:
        reference = beside.submit(asyncio.run, _turns(reading.done))
        ours = await _turns(reading.done)
        await reading

    assert ours > 3 / 4 * reference.result(), "the engine holds the loop"


async def _turns(has_ended: Callable[[], bool]) -> int:
    """Count the turns of the running loop; a busy machine slows all loops of a process alike."""
    count = 0
    while not has_ended():
        await asyncio.sleep(0.005)
        count += 1
    return count


def _hold(held: threading.Event, gate: threading.Event) -> None:
    held.set()
    assert gate.wait(30)


async def refuses_what_does_not_fit(bench: Bench) -> None:
    """One bad request ends alone, whether it waits for a swap or not; the engine goes on."""
    long = bench.prompt(256)
    bad = {"max_model_len must be > the tokens": long, "got 3 to 1000000": (3, 10**6, 4)}
    bad |= {"got -1 to 4": (4, -1), "got 256 for 256": long[:256]}
    refused = [bench.request(max_tokens=5, token_ids=ids) for ids in bad.values()]
    good = bench.submit(bench.request(max_tokens=5))
    bench.engine.submit(refused)
    deltas: list[Delta] = []
    async with asyncio.timeout(60):
        while len(deltas) < len(bad) or not good[0].finish_reason:
            came = await bench.engine.deltas()
            deltas += [delta for delta in came if delta.refusal is not None]
            bench.note([delta for delta in came if delta.refusal is None])
    by_id = {delta.request_id: delta for delta in deltas}
    for request, reason in zip(refused, bad, strict=True):
        assert reason in str(by_id[request.request_id].refusal)
        assert by_id[request.request_id].finish_reason == "refused"
    await bench.engine.apply(bench.stage_next())
    await bench.finish(bench.submit(bench.request(max_tokens=5)))
    with pytest.raises(SettingsError, match=r"a probe must hold 2 to 255 tokens, got 1"):
        await bench.engine.probe((3,))


async def refuses_a_torn_file(bench: Bench) -> None:
    """A file that is not what its manifest says changes nothing."""
    version = bench.engine.version
    staged = bench.stage_next()
    del bench.models[staged.manifest.version]
    torn = StagedWeights(bench.folder / "torn", staged.manifest)
    torn.path.write_bytes(staged.path.read_bytes()[:-4])

    with pytest.raises(WeightsError, match=r"torn must hold \d+ bytes, got \d+"):
        await bench.engine.apply(torn)
    with pytest.raises(WeightsError, match=r"must be a readable file"):
        await bench.engine.apply(StagedWeights(bench.folder / "absent", staged.manifest))

    with pytest.raises(WeightsError, match=r"must be a readable file"):
        await bench.engine.read_back(StagedWeights(bench.folder / "absent", staged.manifest))
    assert bench.engine.version == version
    await probe_agrees(bench)


async def overwritten_weights_make_no_token(bench: Bench) -> None:
    """Where others came into the file meanwhile: the old ones go on, or nothing until the next."""
    before, staged = bench.engine.version, bench.stage_next()
    overwritten = bench.folder / "overwritten"
    noise = torch.randn(staged.manifest.num_bytes // 4, generator=torch.Generator().manual_seed(1))
    overwritten.write_bytes(noise.numpy().tobytes())
    await rest()
    transcripts = bench.submit(*[bench.request(max_tokens=200) for _ in range(6)])
    await bench.read(lambda: all(t.token_ids for t in transcripts))

    with pytest.raises(WeightsOverwritten, match="got newer ones in their place"):
        await bench.engine.apply(StagedWeights(overwritten, staged.manifest, lambda: False))
    assert bench.engine.version == before
    await bench.engine.apply(staged)
    await bench.finish(transcripts)

    await probe_agrees(bench)
    for transcript in transcripts:
        assert [span.version for span in transcript.versions] == [before, bench.engine.version]
        switch = transcript.versions[1].start
        ids = list(transcript.request.token_ids) + transcript.token_ids
        old = reference_logprobs(bench.models[before], ids)[len(transcript.request.token_ids) - 1 :]
        gap = (old - torch.tensor(transcript.logprobs)).abs()
        assert gap[:switch].max() < TOLERANCE


async def one_delta_for_each_request(bench: Bench) -> None:
    """However late the reader comes, it gets one joined delta."""
    transcripts = bench.submit(*[bench.request(max_tokens=100) for _ in range(5)])
    await asyncio.sleep(1.0)
    deltas: list[Delta] = await bench.engine.deltas()
    assert len({delta.request_id for delta in deltas}) == len(deltas)
    for delta in deltas:
        transcript = bench.transcripts[delta.request_id]
        transcript.token_ids += delta.token_ids
        transcript.finish_reason = delta.finish_reason
    await bench.finish(transcripts)
    assert all(len(transcript.token_ids) == 100 for transcript in transcripts)


BATTERY = (
    swaps_under_load,
    switch_at_one_token,
    keeps_kv,
    queued_requests_start_fresh,
    overflow_starts_fresh,
    resumes,
    ends,
    ends_by_a_string,
    end_of_text_is_no_stop,
    greedy,
    aborts,
    halts_with_every_token,
    keeps_the_loop_free,
    refuses_what_does_not_fit,
    refuses_a_torn_file,
    overwritten_weights_make_no_token,
    one_delta_for_each_request,
)
