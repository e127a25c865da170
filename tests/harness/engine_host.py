"""The process of an engine: it runs the commands that `EngineProcess` sends it.

`python -m tests.harness.engine_host SPEC` reads lines of JSON on standard input, and answers them
on the descriptor that `ANSWERS_FD` names.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from typing import IO, TYPE_CHECKING, Any

from sidecar.demo.engine import dtype
from tests.harness.engine import ANSWERS_FD, EngineSpec

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


class _Host:
    """Runs commands against an `AsyncLLM`."""

    def __init__(self, engine: Any, answers: IO[str]) -> None:
        self._engine = engine
        self._answers = answers
        self._running: dict[int, str] = {}

    async def run(self, command: dict[str, Any]) -> None:
        handle = command.pop("id")
        verb = command.pop("verb")
        try:
            answer = await getattr(self, f"_do_{verb}")(handle, **command)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        self._answers.write(json.dumps({"id": handle, **answer}) + "\n")
        self._answers.flush()

    async def _do_generate(
        self,
        handle: int,
        prompt: list[int],
        max_tokens: int,
        logprobs: int,
        cache_salt: str | None,
        ignore_eos: bool,
        adapter: list[Any] | None,
        regex: str | None,
        image: int | None,
        rank: int | None,
        kv_transfer_params: dict[str, Any] | None,
        priority: int,
        samples: int,
        prompt_logprobs: int | None,
        as_embeddings: bool,
        inputs: list[list[int]] | None,
        trace_headers: dict[str, str] | None,
    ) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.inputs import EmbedsPrompt, TokensPrompt
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        extra = None if kv_transfer_params is None else {"kv_transfer_params": kv_transfer_params}
        kind = RequestOutputKind.CUMULATIVE
        if inputs is not None:
            # Else what came of the inputs before is forgotten with the next one.
            kind = RequestOutputKind.DELTA
        elif samples > 1:
            # Else an output is that of one of them.
            kind = RequestOutputKind.FINAL_ONLY
        params = SamplingParams(
            n=samples,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            # vLLM draws several samples only where chance has a say.
            temperature=1.0 if samples > 1 else 0.0,
            seed=handle if samples > 1 else None,
            ignore_eos=ignore_eos,
            structured_outputs=None if regex is None else StructuredOutputsParams(regex=regex),
            extra_args=extra,
            output_kind=kind,
        )

        def tokens_of(tokens: list[int]) -> Any:
            given = TokensPrompt(prompt_token_ids=tokens)
            if cache_salt is not None:
                given["cache_salt"] = cache_salt
            return given

        given: Any = tokens_of(prompt)
        if as_embeddings:
            table = _embedding_table(self._engine.model_config.model)
            given = EmbedsPrompt(prompt_embeds=table[prompt])
            if cache_salt is not None:
                given["cache_salt"] = cache_salt
        if image is not None:
            given["multi_modal_data"] = {"image": _random_image(image)}
        if inputs is not None:
            given = _input_stream([given, *map(tokens_of, inputs)])
        lora = None if adapter is None else LoRARequest(*adapter)
        request_id = self._running[handle] = f"request-{handle}"
        started = time.perf_counter()
        ttft = 0.0
        last: Any = None
        tokens: list[int] = []
        positions: list[dict[str, float]] = []
        try:
            async for output in self._engine.generate(
                given,
                params,
                request_id,
                lora_request=lora,
                data_parallel_rank=rank,
                priority=priority,
                trace_headers=trace_headers,
            ):
                if last is None:
                    ttft = time.perf_counter() - started
                last = output
                if inputs is not None:
                    more, at = _sample(output.outputs[0])
                    tokens += more
                    positions += at
        finally:
            self._running.pop(handle, None)
        done = [] if last is None else [_sample(one) for one in last.outputs]
        if inputs is None and done:
            tokens, positions = done[0]
        asked = last.prompt_logprobs if last is not None else None
        return {
            "tokens": tokens,
            "logprobs": positions,
            "samples": done if samples > 1 else None,
            "prompt_logprobs": (
                None
                if asked is None
                else [None if one is None else _by_token(one) for one in asked]
            ),
            "cached_tokens": int(last.num_cached_tokens or 0) if last is not None else 0,
            "ttft_ms": ttft * 1000,
            "total_ms": (time.perf_counter() - started) * 1000,
            "finish_reason": last.outputs[0].finish_reason if last is not None else None,
            "kv_transfer_params": last.kv_transfer_params if last is not None else None,
        }

    async def _do_embed(
        self, handle: int, prompt: list[int], cache_salt: str | None, task: Any
    ) -> dict[str, Any]:
        from vllm import PoolingParams
        from vllm.inputs import TokensPrompt

        given = TokensPrompt(prompt_token_ids=prompt)
        if cache_salt is not None:
            given["cache_salt"] = cache_salt
        request_id = self._running[handle] = f"request-{handle}"
        started = time.perf_counter()
        last: Any = None
        try:
            async for output in self._engine.encode(given, PoolingParams(task=task), request_id):
                last = output
        finally:
            self._running.pop(handle, None)
        total_ms = (time.perf_counter() - started) * 1000
        found: list[Any] = last.outputs.data.tolist() if last is not None else []
        return {
            "tokens": [],
            "logprobs": [],
            "cached_tokens": int(last.num_cached_tokens or 0) if last is not None else 0,
            "ttft_ms": total_ms,
            "total_ms": total_ms,
            "finish_reason": None,
            "embeddings": [found] if task == "embed" else found,
        }

    async def _do_abort(self, _: int, handle: int) -> dict[str, Any]:
        request_id = self._running.get(handle)
        if request_id is not None:
            await self._engine.abort(request_id)
        return {}

    async def _do_reset(self, _: int, connector: bool) -> dict[str, Any]:
        done = await self._engine.reset_prefix_cache(reset_connector=connector)
        return {"done": done is not False}

    async def _do_pause(self, _: int, mode: Any) -> dict[str, Any]:
        await self._engine.pause_generation(mode=mode)
        return {}

    async def _do_resume(self, _: int) -> dict[str, Any]:
        await self._engine.resume_generation()
        return {}

    async def _do_counter(self, _: int, name: str, labels: dict[str, str]) -> dict[str, Any]:
        from prometheus_client import REGISTRY

        samples = [
            sample.value
            for metric in REGISTRY.collect()
            if metric.name == name
            for sample in metric.samples
            if sample.name == f"{name}_total" and labels.items() <= sample.labels.items()
        ]
        return {"value": sum(samples)}

    async def _do_rpc(
        self,
        _: int,
        method: str,
        args: list[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        given, named = tuple(args or ()), options or {}
        if self._engine.vllm_config.parallel_config.data_parallel_size == 1:
            return {"result": await self._engine.collective_rpc(method, args=given, kwargs=named)}
        # vLLM calls the workers of all ranks too, but answers with the first rank's.
        core = self._engine.engine_core
        ranks = await core.call_utility_all_async("collective_rpc", method, None, given, named)
        return {"result": [worker for workers in ranks for worker in workers]}

    async def _do_add_lora(self, _: int, adapter: list[Any]) -> dict[str, Any]:
        from vllm.lora.request import LoRARequest

        return {"done": await self._engine.add_lora(LoRARequest(*adapter))}

    async def _do_core(self, _: int, method: str) -> dict[str, Any]:
        return {"result": await self._engine.engine_core.call_utility_all_async(method)}


def _by_token(position: Any) -> dict[str, float]:
    return {str(token): value.logprob for token, value in position.items()}


def _sample(output: Any) -> tuple[list[int], list[dict[str, float]]]:
    return list(output.token_ids), [_by_token(position) for position in output.logprobs or []]


async def _input_stream(prompts: list[Any]) -> AsyncGenerator[Any]:
    from vllm.engine.protocol import StreamingInput

    for prompt in prompts:
        yield StreamingInput(prompt=prompt)


def _embedding_table(model: str) -> Any:
    from safetensors import safe_open

    with safe_open(os.path.join(model, "model.safetensors"), framework="pt") as weights:
        return weights.get_tensor("model.embed_tokens.weight")


def _random_image(seed: int) -> Any:
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


async def _serve(spec: EngineSpec, answers: IO[str]) -> None:
    import vllm
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    transfer = spec.connector
    if transfer is None and spec.socket is not None:
        transfer = {
            "kv_connector": "KVLakeConnector",
            "kv_connector_module_path": "connector.vllm",
            "kv_role": spec.kv_role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"socket": spec.socket, **spec.connector_extra},
        }
    if spec.beside:
        transfer = {
            "kv_connector": "MultiConnector",
            "kv_role": spec.kv_role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": [transfer, *spec.beside]},
        }
    arguments: dict[str, Any] = {
        "model": spec.model,
        "dtype": dtype(),
        "block_size": 32,
        "max_model_len": 8192,
        "max_num_batched_tokens": 8192,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "worker_extension_cls": "tests.harness.probe.KVProbe",
        "kv_transfer_config": transfer,
        **spec.engine_args,
    }
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    host = _Host(engine, answers)
    version = f"vllm {vllm.__version__}"
    answers.write(json.dumps({"id": 0, "version": version}) + "\n")
    answers.flush()
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[str | None] = asyncio.Queue()

    def feed() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(lines.put_nowait, line)
        loop.call_soon_threadsafe(lines.put_nowait, None)

    threading.Thread(target=feed, daemon=True).start()
    try:
        async with asyncio.TaskGroup() as tasks:
            while (line := await lines.get()) is not None:
                tasks.create_task(host.run(json.loads(line)))
    finally:
        engine.shutdown()


def main() -> None:
    """The process: one argument, the `EngineSpec` as JSON."""
    spec = EngineSpec(**json.loads(sys.argv[1]))
    fd = int(os.environ.pop(ANSWERS_FD))
    os.set_inheritable(fd, False)
    with os.fdopen(fd, "w") as answers:
        asyncio.run(_serve(spec, answers))


if __name__ == "__main__":
    main()
