"""What engines make of our files: vLLM, llama.cpp and OpenVINO, with the pair of `make demo`.

VLLM is a Python with vLLM, OPENVINO one with OpenVINO GenAI, LLAMA_SERVER a llama-server built in
llama.cpp's tree (`make test-engines`).
"""

import json
import math
import operator
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import accumulate, pairwise, takewhile
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.engines import llama, openvino, to_gguf, vllm
from distill.config import DistilConfig
from distill.drafts.mtp import read_head
from eval.decode_config import DecodeConfig
from eval.decoder import SpeculativeDecoder
from eval.measuring.schedule import schedule
from eval.measuring.served import ServedEngine
from eval.rounds import Round
from heads import ConfidenceHead
from heads.probe import probe_of
from recipes.command import run_tool
from recipes.config import TOY
from specdata.config import PromptSet, ServerConfig
from specdata.drafts.dspark_network import read_blocks
from specdata.drafts.taps import read_taps
from specdata.models import end_ids, load_model, load_tokenizer
from specdata.prompts.loading import load_prompts
from specdata.rollouts.backend import Request
from specdata.rollouts.vllm import VllmBackend
from specdata.sampling import SamplingConfig
from specdata.saving import copy_tokenizer
from specdata.server.client import ServerClient
from specdata.storage.dataset import load_stored, of_split
from specdata.target_heads import find_head
from tests.support.initial import make
from tests.support.trainings import distilled

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "runs/toy"
TARGET = DEMO / "pair/target"
VLLM, LLAMA = os.environ.get("VLLM", ""), os.environ.get("LLAMA_SERVER", "")
OPENVINO = os.environ.get("OPENVINO", "")
SETS, SPLITS = ("instruct", "maths", "code"), {"train": 80, "dev": 16, "test": 4}
LONGEST = 64

pytestmark = pytest.mark.engines
needs_vllm = pytest.mark.skipif(not VLLM, reason="VLLM names no Python with vLLM")
needs_openvino = pytest.mark.skipif(not OPENVINO, reason="OPENVINO names no Python with it")
needs_llama = pytest.mark.skipif(not LLAMA, reason="LLAMA_SERVER names no llama-server")


def serve(log: Path, speculative: dict[str, Any] | None = None) -> Any:
    """vLLM on the CPU with the demo's target, in float32."""
    return vllm(VLLM, str(TARGET), log, speculative)


def serve_llama(folder: Path, draft: Path, kind: str, length: int, least: float = 0.0) -> Any:
    """llama-server with the demo's target and a draft, in float32."""
    for path, name in ((TARGET, "target"), (draft, "draft")):
        to_gguf(LLAMA, str(path), str(TARGET), folder / f"{name}.gguf", "f32")
    caches = ("cache-type-k", "cache-type-v", "spec-draft-type-k", "spec-draft-type-v")
    options = {
        "threads": 1,
        "flash-attn": "off",  # which moves logits by .005
        **dict.fromkeys(caches, "f32"),
        "spec-type": kind,
        "spec-draft-model": folder / "draft.gguf",
        "spec-draft-n-max": length,
        "spec-draft-p-min": least,
    }
    return llama(LLAMA, str(folder / "target.gguf"), folder / "log", options)


def serve_openvino(folder: Path, draft: Path, length: int) -> Any:
    """OpenVINO GenAI with the demo's target and a draft, in float32."""
    out, to = folder / "converted", ["--for", "openvino", "--python", OPENVINO]
    assert run_tool("export", [str(draft), "--target", str(TARGET), "--out", str(out), *to]) == 0
    options = {"draft": out / "draft", "length": length}
    return openvino(OPENVINO, str(out / "target"), folder / "log", options)


@pytest.fixture(scope="module")
def target() -> Any:
    return load_model(str(TARGET))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """The 24 that `make demo` measures."""
    sets = [PromptSet(name, split="test", count=8) for name in SETS]
    loaded = load_prompts(sets, load_tokenizer(str(TARGET)), seed=0, max_tokens=192)
    return [prompt.ids for prompt in loaded.prompts]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """vLLM without a draft."""
    with serve(tmp_path_factory.mktemp("alone") / "log") as url:
        yield url


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Name -> a draft as it decodes here, and as engines load it: its release, if it has one."""
    folder = tmp_path_factory.mktemp("drafts")
    made = {"plain": (DEMO / "draft/model", DEMO / "release/draft")}
    rollouts = of_split(load_stored(DEMO / "rollouts"), "train", DEMO / "rollouts")
    dev = of_split(load_stored(DEMO / "rollouts"), "dev", DEMO / "rollouts").select(range(8))
    config = DistilConfig(depths=4, epochs=0.2, report_to=[])
    own = {"train": rollouts, "dev": dev, "draft": DEMO / "draft/model"}
    distilled(DEMO / "pair", folder / "masks", config, **own)
    made["masks"] = (folder / "masks", folder / "masks")
    each = [
        {"name": name, "split": split, "count": count}
        for name in SETS
        for split, count in SPLITS.items()
    ]
    given = ["--config", str(TOY), "--toy", "null", "--head", "null", "--models.draft", "null"]
    given += ["--models.target", str(TARGET), "--draft.epochs", "1"]
    given += ["--rollouts.sets", json.dumps(each), "--eval.sets", "[{name: maths, count: 1}]"]
    given += ["--eval.methods", "[{name: plain, decoder: plain}, {name: K=4, length: 4}]"]
    for name, init in {
        "plain of 200 tokens": "{kind: target, layers: 2, vocabulary: 200, align: true}",
        "eagle3": "{kind: states, layout: eagle3, layers: 1}",
        "eagle3 of 200 tokens": "{kind: states, layout: eagle3, layers: 1, vocabulary: 200}",
    }.items():
        run = folder / name
        pipeline = [sys.executable, "-m", "recipes.command", "pipeline", *given]
        pipeline += ["--output", str(run), "--draft.init", init]
        subprocess.run(pipeline, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        made[name] = (run / "draft/model", run / "release/draft")
    return made


@contextmanager
def asking(url: str, target: Any) -> Iterator[VllmBackend]:
    """Asks a server for greedy texts."""
    with closing(ServerClient(ServerConfig(url=url, model="target"), "test")) as client:
        yield VllmBackend(
            client=client,
            model="target",
            sampling=SamplingConfig(0.0),
            max_new_tokens=LONGEST,
            ends=frozenset(end_ids(target.generation_config)),
            vocabulary=target.config.vocab_size,
            seed=0,
        )


def decoded_here(
    decoder: SpeculativeDecoder, name: str, ids: list[int], served: list[int]
) -> list[Round]:
    """Our rounds that draft, of the text that an engine served, which is made sure of.

    The forward of the prompt gives an engine a token and drafts nothing, as ours does with a draft
    on the target's states; a plain draft drafts at once here.
    """
    read = ids if name.startswith("eagle") else [*ids, served[0]]
    left = LONGEST - (len(read) - len(ids))
    here = decoder.generate(torch.tensor(read), max_new_tokens=left, generator=torch.Generator())
    assert [*read, *here.tokens.tolist()] == [*ids, *served]
    return [each for each in here.rounds if each.drafted]


@pytest.mark.parametrize(
    ("name", "method", "length"),
    [
        pytest.param("plain", "draft_model", 4, marks=needs_vllm),
        pytest.param("plain of 200 tokens", "draft_model", 2, marks=needs_vllm),
        pytest.param("masks", "draft_model", 4, marks=needs_vllm),
        pytest.param("eagle3", "eagle3", 4, marks=needs_vllm),
        pytest.param("eagle3 of 200 tokens", "eagle3", 2, marks=needs_vllm),
        pytest.param("plain", "draft-simple", 4, marks=needs_llama),
        pytest.param("eagle3", "draft-eagle3", 3, marks=needs_llama),
        pytest.param("plain", "openvino", 3, marks=needs_openvino),
        pytest.param("eagle3", "openvino", 3, marks=needs_openvino),
        pytest.param("eagle3 of 200 tokens", "openvino", 4, marks=needs_openvino),
    ],
)
def test_an_engine_accepts_what_our_decoder_counts(
    name: str,
    method: str,
    length: int,
    target: Any,
    prompts: list[list[int]],
    drafts: dict[str, tuple[Path, Path]],
    tmp_path: Path,
) -> None:
    """vLLM counts by position, llama-server drafted and accepted tokens of each request.

    OpenVINO counts an end token that was drafted as the target's own.
    """
    ours, theirs = drafts[name]
    config = DecodeConfig(length=length, temperature=0.0)
    decoder = SpeculativeDecoder.from_config(target, load_model(str(ours)), config)
    found: Counter[str | int] = Counter()
    counted: Counter[str | int] = Counter()
    speculative: dict[str, Any] = {"method": method, "model": str(theirs)}
    speculative |= {"num_speculative_tokens": length, "parallel_drafting": name == "masks"}
    is_llama, is_openvino = method.startswith("draft-"), method == "openvino"
    if is_llama:
        server = serve_llama(tmp_path, theirs, method, length)
    elif is_openvino:
        server = serve_openvino(tmp_path, theirs if name == "plain" else ours, length)
    else:
        server = serve(tmp_path / "log", speculative)
    with server as url, asking(url, target) as backend:
        for number, ids in enumerate(prompts):
            if not is_llama:
                served = ServedEngine(backend).generate(ids, str(number), LONGEST)
                for each in served.rounds:
                    found.update([*["rounds"] * (each.drafted > 0), *range(each.accepted)])
                for each in decoded_here(decoder, name, ids, served.tokens.tolist()):
                    kept = min(each.accepted, each.emitted - is_openvino)
                    counted.update(["rounds", *range(kept)])
                continue
            [done] = backend.complete([Request(ids, (str(number),))])
            body = {"prompt": ids, "n_predict": LONGEST, "temperature": 0}
            timings = httpx2.post(f"{url}/completion", json=body, timeout=60).json()["timings"]
            found += Counter(drafted=timings["draft_n"], accepted=timings["draft_n_accepted"])
            # It drafts past an end token, which ours does not, and such a token within a draft
            # does not count as accepted.
            drafting = decoded_here(decoder, name, ids, done.ids)
            last = drafting[-1]
            within = last.accepted == last.emitted < length and done.finish == "eos"
            counted["drafted"] += length * len(drafting)
            counted["accepted"] += sum(each.accepted for each in drafting) - within
    assert found == counted


@needs_vllm
def test_vllm_drafts_at_each_number_of_requests_what_our_schedule_says(
    prompts: list[list[int]], tmp_path: Path
) -> None:
    """Asked is one request, while all others are under way before and after it."""
    lengths = {1: 3, 4: 1, 16: 0}
    speculative = {"method": "draft_model", "model": str(DEMO / "release/draft")}
    speculative |= {"num_speculative_tokens": 3}
    speculative |= {"num_speculative_tokens_per_batch_size": schedule(lengths)}
    running = re.compile(r"^vllm:num_requests_running\{.*\} (\S+)", re.MULTILINE)
    with serve(tmp_path / "log", speculative) as url, httpx2.Client(timeout=600) as client:

        def drafted(ids: list[int], tokens: int) -> list[int]:
            """Tokens of each draft of one request."""
            body = {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
            answer = client.post(f"{url}/v1/completions", json=body).json()
            counted = answer["metrics"]["speculative_decoding"]["per_step_drafted"]
            return counted or []

        def others() -> int:
            found = running.search(client.get(f"{url}/metrics").text)
            assert found
            return int(float(found[1]))

        for number, length in lengths.items():
            with ThreadPoolExecutor(number) as pool:
                beside = [pool.submit(drafted, ids, 256) for ids in prompts[1:number]]
                while others() < number - 1:
                    assert not any(each.done() for each in beside)
                found = drafted(prompts[0], 24)
                assert not any(each.done() for each in beside)
            assert set(found) == ({length} if length else set())


@pytest.fixture(scope="module")
def with_head(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A target that brings a head along, which ends at no token."""
    out = tmp_path_factory.mktemp("head") / "target"
    program = [sys.executable, "benchmarks/mtp_target.py", str(DEMO), "--out", str(out)]
    subprocess.run(program, check=True, cwd=ROOT)
    made = load_model(str(out))
    made.generation_config.eos_token_id = None
    return made


@needs_vllm
@pytest.mark.parametrize(
    ("length", "written"), [(1, False), (2, False), (3, False), pytest.param(3, True, id="export")]
)
def test_vllm_drafts_with_a_targets_head_as_ours_does_fed_its_way_and_no_other(
    length: int, written: bool, with_head: Any, prompts: list[list[int]], tmp_path: Path
) -> None:
    """Every token of every draft: a last one goes on beyond the text's end, here as there.

    Also if the head was `written` into a target that transformers had saved, without it.
    """
    head = find_head(with_head.name_or_path)
    vllms, counted = head.family.engines["vllm"], []
    other = replace(vllms, normed_own=not vllms.normed_own)
    config = DecodeConfig(length=length, temperature=0.0)
    make(Path(with_head.name_or_path), tmp_path / "draft", kind="mtp")
    for draft in (load_model(str(tmp_path / "draft")), read_head(with_head, head, other)):
        draft.generation_config.eos_token_id = None
        decoder = SpeculativeDecoder.from_config(with_head, draft, config)
        counts, texts = Counter[str](), []
        for ids in prompts:
            most = LONGEST + length
            here = decoder.generate(
                torch.tensor(ids), max_new_tokens=most, generator=torch.Generator()
            )
            texts.append(here.tokens[:LONGEST].tolist())
            ends = accumulate(each.emitted for each in here.rounds)
            for each, end in zip(here.rounds, ends, strict=True):
                if each.drafted and end - each.emitted < LONGEST:
                    counts.update(drafts=1, draft_tokens=each.drafted)
                    counts.update(map(str, range(each.accepted)))
        counted.append(counts)
    speculative, folder = (
        {"method": "mtp", "num_speculative_tokens": length},
        with_head.name_or_path,
    )
    if written:
        bare, folder = tmp_path / "bare", str(tmp_path / "written")
        with_head.save_pretrained(bare)
        copy_tokenizer(with_head.name_or_path, bare)
        given = [str(tmp_path / "draft"), "--into", str(bare), "--out", folder]
        assert run_tool("export", given) == 0
    served = vllm(VLLM, folder, tmp_path / "log", speculative)
    with served as url, asking(url, with_head) as backend:
        asked = {"max_tokens": LONGEST, "temperature": 0, "ignore_eos": True}
        asked |= {"model": "target", "return_token_ids": True}
        for ids, text in zip(prompts, texts, strict=True):
            body = {"prompt": ids, **asked}
            answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=60).json()
            assert answer["choices"][0]["token_ids"] == text
        found = ServedEngine(backend).counts()
    assert +found == counted[0]
    assert (counted[1] == counted[0]) == (length == 1)


Blocks = tuple[Path, Path, ConfidenceHead]
BLOCKS = {"dspark": {"layers": 1}, "dspark of 200 tokens": {"layers": 2, "vocabulary": 200}}


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Blocks]:
    """Name -> a draft of blocks of four, as it is exported, and its head of any numbers."""
    folder, made = tmp_path_factory.mktemp("blocks"), {}
    rollouts = of_split(load_stored(DEMO / "rollouts"), "train", DEMO / "rollouts")
    for name, settings in BLOCKS.items():
        ours, theirs = folder / name, folder / f"{name} exported"
        make(TARGET, ours, rollouts, kind="states", layout="dspark", block=4, **settings)
        draft = load_model(str(ours))
        torch.manual_seed(0)
        size = draft.get_output_embeddings().in_features
        head = ConfidenceHead(hidden_size=size, probe=probe_of(draft), rejection_weight=2.0)
        head.save_pretrained(folder / f"{name} head")
        given = [str(ours), "--out", str(theirs), "--head", str(folder / f"{name} head")]
        assert run_tool("export", given) == 0
        made[name] = (ours, theirs, head)
    return made


@torch.inference_mode()
def greedy_blocks(
    draft: Any, head: ConfidenceHead, text: list[int], size: int
) -> tuple[list[list[int]], list[list[float]]]:
    """What is drafted behind each token of a text, and how probably each is accepted: (T, size)."""
    ids, reads, output = torch.tensor([text]), draft.model.embed_tokens, draft.lm_head
    every = torch.arange(len(text))[None]
    read = read_blocks(draft.model, ids, reads.read_target(ids), every, size).last_hidden_state[0]
    before, tokens, chances = ids[0], [], []
    for slot in range(size):
        states = torch.cat([read[:, slot, : reads.width], reads.markov(before)], dim=-1)
        before = output(states).argmax(dim=-1)
        tokens.append(before)
        chances.append(torch.sigmoid(head(states) + math.log(head.rejection_weight)))
    return torch.stack(tokens, dim=1).tolist(), torch.stack(chances, dim=1).tolist()


@needs_llama
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(("length", "asks"), [(3, False), (4, True)])
def test_llama_server_drafts_blocks_as_ours_and_cuts_them_where_the_head_doubts(
    name: str,
    length: int,
    asks: bool,
    target: Any,
    prompts: list[list[int]],
    blocks: dict[str, Blocks],
    tmp_path: Path,
) -> None:
    """It drops the first token of less probability and what follows, so it may draft nothing."""
    ours, theirs, head = blocks[name]
    draft = load_model(str(ours))
    config = DecodeConfig(length=length, temperature=0.0)
    decoder = SpeculativeDecoder.from_config(target, draft, config)
    budget, least = {"max_new_tokens": LONGEST, "generator": torch.Generator()}, 0.0
    here = [decoder.generate(torch.tensor(ids), **budget) for ids in prompts]
    texts = [[*ids, *each.tokens.tolist()] for ids, each in zip(prompts, here, strict=True)]
    read = [greedy_blocks(draft, head, text, length) for text in texts]
    if asks:  # in the widest gap near the median, as rounding differs
        every = sorted(chance for _, chances in read for each in chances for chance in each)
        middle = pairwise(every[len(every) * 2 // 5 : len(every) * 3 // 5])
        least = sum(max(middle, key=lambda pair: pair[1] - pair[0])) / 2
    counted: Counter[str] = Counter()
    server = serve_llama(tmp_path, theirs, "draft-dspark", length, least)
    with server as url, asking(url, target) as backend:
        for ids, text, each, (tokens, chances) in zip(prompts, texts, here, read, strict=True):
            body = {"prompt": ids, "n_predict": LONGEST, "temperature": 0, "return_tokens": True}
            served = httpx2.post(f"{url}/completion", json=body, timeout=60).json()["tokens"]
            assert [*ids, *served] == text
            at, rounds = len(ids), []
            while at < len(text) - 1:
                doubted = [slot for slot, chance in enumerate(chances[at]) if chance < least]
                drafted = tokens[at][: min([length, LONGEST + len(ids) - at - 2, *doubted])]
                same = map(operator.eq, drafted, text[at + 1 :])
                accepted = len([*takewhile(bool, same)])
                at += accepted + 1
                rounds += [accepted] * bool(drafted)
                # It drafts past an end token, which is not accepted then.
                within = at == len(text) and accepted < len(drafted)
                counted.update(["drafts"] * bool(drafted), draft_tokens=len(drafted))
                counted.update(map(str, range(accepted - within)))
            if not asks:
                assert [one.accepted for one in each.rounds if one.drafted] == rounds
        found = ServedEngine(backend).counts()
    assert +found == counted


@needs_vllm
@pytest.mark.parametrize("name", BLOCKS)
def test_vllms_classes_give_the_logits_and_chances_of_a_draft_in_blocks(
    name: str, target: Any, prompts: list[list[int]], blocks: dict[str, Blocks], tmp_path: Path
) -> None:
    ours, theirs, head = blocks[name]
    draft = load_model(str(ours))
    ids = torch.tensor([prompts[0]])
    begin, size = ids.shape[1] - 4, 4
    taps = read_taps(target, draft.config.target_states["taps"], ids)
    given = {"taps": taps[0, :begin].contiguous(), "ids": ids[0, begin:].contiguous()}
    save_file(given, tmp_path / "given")
    files = [str(tmp_path / each) for each in ("given", "found")]
    script = [
        VLLM,
        str(ROOT / "tests/support/drive_vllm_dspark.py"),
        str(theirs),
        str(TARGET),
        *files,
    ]
    subprocess.run(script, check=True, stdout=subprocess.DEVNULL)
    found = load_file(tmp_path / "found")
    with torch.inference_mode():
        states = read_blocks(draft.model, ids, taps, torch.tensor([[begin]]), size)
        states = states.last_hidden_state[0, 0]
        logits = draft.lm_head(states)[:, found["ids"]]
        chances = torch.sigmoid(head(states) + math.log(head.rejection_weight))
    torch.testing.assert_close(found["logits"], logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found["chances"], chances, rtol=1e-4, atol=1e-4)
    kept = draft.get_output_embeddings().vocabulary_ids
    assert torch.equal(found["ids"], kept)


@needs_vllm
def test_rollouts_and_labels_through_vllm_are_those_of_the_local_target(
    alone: str, tmp_path: Path
) -> None:
    given = ["--config", str(TOY), "--toy", "null", "--models.target", str(TARGET)]
    given += ["--models.draft", str(DEMO / "draft/model"), "--draft", "null"]
    sets = "[{name: maths, split: train, count: 24}, {name: maths, split: dev, count: 8}]"
    given += ["--rollouts.sets", sets, "--sampling.top_k", "16", "--head.epochs", "1"]
    served = json.dumps({"url": alone, "model": "target"})
    remote = [*given, "--output", str(tmp_path), "--rollouts.backend", "vllm"]
    remote += ["--rollouts.vllm", served, "--logits.backend", "vllm", "--logits.server", served]
    remote += ["--logits.top_logits", "16", "--rollouts.store_states", "false"]
    here = tmp_path / "here"
    for stage, options in (
        ("make_rollouts", remote),
        ("make_logits", remote),
        ("train_head", [*remote, "--labels.logits", str(tmp_path / "logits")]),
        ("train_head", [*given, "--output", str(here)]),
    ):
        if options[-1] == str(here):
            shutil.copytree(tmp_path / "rollouts", here / "rollouts")
        command = [sys.executable, f"recipes/{stage}.py", *options]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    ours, theirs = (load_stored(folder / "labels").to_list() for folder in (here, tmp_path))
    assert ours
    assert [row["draft_ids"] for row in ours] == [row["draft_ids"] for row in theirs]
    for local, remote_row in zip(ours, theirs, strict=True):
        assert remote_row["accept_prob"] == pytest.approx(local["accept_prob"], abs=1e-4)
