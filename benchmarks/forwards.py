"""A forward of a few tokens on a CPU: our engines beside ONNX Runtime and OpenVINO.

    pip install onnxruntime==1.32.0 openvino==2026.4.1 onnx onnxscript
    python benchmarks/forwards.py [--seconds 40] [--threads 2] [--out FILE]

A model of SmolLM2-135M's shape reads 1, 3 and 5 tokens after 100 in the cache, in float32. Its
weights are random and rounded to bfloat16, in which models are published (`--stored float32`: not).
All run the same weights in turns, in one process; the times are medians. `matrices` are the
products of the captured graph alone. The others get the cache as contiguous arrays and give it back
longer. Without these packages our engines are measured alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from eval.measuring.environment import describe_environment
from eval.runtime.feeding import sequence_of
from eval.runtime.graphs import shared_graphs
from eval.runtime.model import CachedModel
from specdata.probability import SamplingConfig
from specdata.storage.files import write_json

CACHED = 100
COUNTS = (1, 3, 5)
Read = Callable[[int], Tensor]
"""Number of new tokens -> their logits."""


def of_shape(layers: int, stored: torch.dtype) -> LlamaForCausalLM:
    """A model of SmolLM2-135M's shape with random weights of this precision, and so many layers."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, num_hidden_layers=layers)).eval()
    for weight in model.parameters():
        weight.data = weight.data.to(stored).float()
    return model


def main() -> None:
    """Measure, print, and write one JSON file."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--seconds", type=float, default=40)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--stored", choices=("bfloat16", "float32"), default="bfloat16")
    options.add_argument("--out", type=Path, default=Path("runs/bench/forwards.json"))
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    target, draft = (of_shape(layers, getattr(torch, given.stored)) for layers in (30, 2))
    report: dict[str, Any] = {"schema_version": 1, "threads": given.threads, "stored": given.stored}
    where = describe_environment(device="cpu", dtype="float32").model_dump()
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        ways = {name: ours(target, name) for name in ("eager", "captured")}
        if all(map(importlib.util.find_spec, ("onnxruntime", "openvino", "onnxscript"))):
            ways |= others(target, Path(folder) / "model.onnx", given.threads, where["software"])
        two_layers = {name: ours(draft, name) for name in ("eager", "captured")}
        for name, each, matrices in (("target", ways, target), ("draft", two_layers, draft)):
            expected = {count: each["eager"](count) for count in COUNTS}
            gaps = {
                way: max(gap(read(count), expected[count]) for count in COUNTS)
                for way, read in each.items()
            }
            times = in_turns(each | {"matrices": products(matrices)}, given.seconds / 2)
            report[name] = {"milliseconds": times, "largest_gap": gaps}
            for way, row in times.items():
                print(name, f"{way:12}", *(f"{row[str(count)]:7.2f} ms" for count in COUNTS))
    write_json(given.out, report | {"environment": where})
    print(f"written: {given.out}")


def ours(model: Any, engine: Any) -> Read:
    """By one of our engines."""
    cached = CachedModel(model, model.config.vocab_size, engine=engine)
    sequence = sequence_of(cached, 0, SamplingConfig())
    sequence.append(list(range(5, 5 + CACHED)), 1).run()

    def read(count: int) -> Tensor:
        logits = sequence.append(list(range(7, 7 + count)), count).run()
        sequence.crop(CACHED)
        return logits

    return read


def products(model: Any) -> Read:
    """The products of the captured graph, one after the other."""
    layers = shared_graphs(model, "captured").prepacker._joined.values()
    unpacked = torch.ops.quantized.linear_unpack_fp16
    widths = [
        (weight if isinstance(weight, Tensor) else unpacked(weight)[0]).shape[1]
        for _, (weight, *_) in layers
    ]

    def read(count: int) -> Tensor:
        x = {width: torch.ones(1, count, width) for width in widths}
        made: list[Tensor] = [
            linear(x[width], *behind)
            for (linear, behind), width in zip(layers, widths, strict=True)
        ]
        return made[-1]

    return read


class _Exported(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor, past: list[Tensor]) -> Any:
        cache = DynamicCache()
        for layer in range(len(past) // 2):
            cache.update(past[2 * layer], past[2 * layer + 1], layer)
        out = self.model(
            input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=cache
        )
        return out.logits, *(part for each in cache.layers for part in (each.keys, each.values))


def others(model: Any, path: Path, threads: int, software: dict[str, str]) -> dict[str, Read]:
    """ONNX Runtime and OpenVINO with the same model, exported by torch."""
    import onnxruntime
    import openvino

    software |= {"onnxruntime": onnxruntime.__version__, "openvino": openvino.__version__}
    cached = CachedModel(model, model.config.vocab_size)
    sequence = sequence_of(cached, 0, SamplingConfig())
    sequence.append(list(range(5, 5 + CACHED)), 1).run()
    past = [each.clone() for each in cached.kv_cache.views(slice(0, 1), 0, CACHED) or ()]

    def inputs(count: int) -> tuple[Any, ...]:
        ids = torch.arange(7, 7 + count)[None]
        behind = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)
        mask = nn.functional.pad(behind, (CACHED, 0))[None, None]
        return ids, torch.arange(CACHED, CACHED + count)[None], mask, past

    names = ["ids", "positions", "mask", *(f"past{index}" for index in range(len(past)))]
    auto = torch.export.Dim.AUTO
    shapes = {"ids": {1: auto}, "positions": {1: auto}, "mask": {2: auto, 3: auto}}
    with torch.inference_mode(False), torch.no_grad():
        plain = tuple(each.clone() for each in inputs(3)[:3])
        program = torch.onnx.export(
            _Exported(model),
            (*plain, [each.clone() for each in past]),
            dynamo=True,
            dynamic_shapes=shapes | {"past": [{2: auto}] * len(past)},
            input_names=names,
            opset_version=18,
        )
    assert program is not None
    program.save(str(path), external_data=True)
    feeds = {}
    for count in COUNTS:
        *first, kept = inputs(count)
        arrays = [each.numpy().copy() for each in (*first, *kept)]
        feeds[count] = dict(zip(names, arrays, strict=True))
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), settings)
    hints = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(str(path), "CPU", hints)
    request = compiled.create_infer_request()

    def by_openvino(count: int) -> Tensor:
        request.infer(feeds[count], share_inputs=True)
        return torch.from_numpy(request.get_output_tensor(0).data[0])

    return {
        "onnxruntime": lambda count: torch.from_numpy(session.run(None, feeds[count])[0][0]),
        "openvino": by_openvino,
    }


def gap(logits: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest logit."""
    return float((logits - expected).abs().max() / expected.abs().max())


def in_turns(ways: dict[str, Read], seconds: float) -> dict[str, dict[str, float]]:
    """Way -> number of tokens -> milliseconds, medians of turns."""
    times: dict[tuple[str, int], list[float]] = {}
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        for way, read in ways.items():
            time.sleep(0.05)  # until another library's threads no longer wait for work
            for count in COUNTS:
                read(count)
                for _ in range(4):
                    begun = time.perf_counter()
                    read(count)
                    times.setdefault((way, count), []).append(time.perf_counter() - begun)
    return {
        way: {str(count): 1e3 * statistics.median(times[way, count]) for count in COUNTS}
        for way in ways
    }


if __name__ == "__main__":
    main()
