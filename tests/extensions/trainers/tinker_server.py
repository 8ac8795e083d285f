"""A service that answers the calls of the package `tinker`, with a tiny model that really learns.

    python -m tests.extensions.trainers.tinker_server MODEL_FOLDER FILE_FOR_THE_PORT

Every parameter is trained, with torch's AdamW, where the service trains an adapter. All state is in
memory: it outlives clients, not the server.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import web
from tinker.proto import tinker_public_pb2 as proto
from transformers import AutoModelForCausalLM

Columns = dict[str, torch.Tensor]

DTYPES = {proto.DTYPE_FLOAT32: "<f4", proto.DTYPE_INT64: "<i8"}


def cross_entropy(logprobs: torch.Tensor, given: Columns) -> torch.Tensor:
    return -(logprobs * given["weights"]).sum()


def importance_sampling(logprobs: torch.Tensor, given: Columns) -> torch.Tensor:
    return -((logprobs - given["logprobs"]).exp() * given["advantages"]).sum()


LOSSES = {"cross_entropy": cross_entropy, "importance_sampling": importance_sampling}


class Training:
    """A model that a client trains, and its optimizer."""

    def __init__(self, folder: Path, state: Any = None) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.updates = 0
        if state:
            self.updates = state["updates"]
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])

    def state(self) -> dict[str, Any]:
        weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        optimizer = clone(self.optimizer.state_dict())
        return {"model": weights, "optimizer": optimizer, "updates": self.updates}

    def forward_backward(self, request: Any) -> bytes:
        """Return the loss and the logprobs of the targets; add gradients unless forward only."""
        total = 0.0
        outputs = []
        for datum in request.data:
            given = {name: tensor_of(each) for name, each in datum.loss_fn_inputs.items()}
            ids = np.frombuffer(datum.model_input[0].encoded_text.tokens, "<i4").astype("<i8")
            logits = self.model(input_ids=torch.tensor(ids[None])).logits[0].float()
            logprobs = torch.log_softmax(logits, -1).gather(1, given["target_tokens"][:, None])[
                :, 0
            ]
            loss = LOSSES[request.loss_fn](logprobs, given)
            if not request.forward_only:
                loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
            outputs.append(logprobs.detach().numpy().astype("<f4"))
        answer = proto.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
        answer.metrics["loss:sum"] = total
        record = answer.loss_fn_outputs.add(num_datums=len(outputs))
        column = record.fields["logprobs"]
        column.dtype = proto.DTYPE_FLOAT32
        column.data = np.concatenate(outputs).tobytes()
        column.offsets = np.cumsum([0, *(each.nbytes for each in outputs)]).astype("<i8").tobytes()
        return bytes(answer.SerializeToString())

    def step(self, adam: dict[str, float]) -> dict[str, Any]:
        for group in self.optimizer.param_groups:
            group |= {"lr": adam["learning_rate"], "betas": (adam["beta1"], adam["beta2"])}
            group |= {"eps": adam["eps"], "weight_decay": adam["weight_decay"]}
        clip = adam["grad_clip_norm"] or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1
        return {"metrics": {"grad_norm:mean": float(norm), "updates": float(self.updates)}}


@torch.no_grad()
def sample(model: Any, body: dict[str, Any]) -> bytes:
    """Return one response, with its stop token, and natural logprobs of temperature 1."""
    params = body["sampling_params"]
    prompt = [token for chunk in body["prompt"]["chunks"] for token in chunk["tokens"]]
    draw = torch.Generator()
    draw.manual_seed(params["seed"]) if params.get("seed") is not None else draw.seed()
    tokens: list[int] = []
    logprobs: list[float] = []
    reason = proto.STOP_REASON_LENGTH
    while len(tokens) < params["max_tokens"] and reason == proto.STOP_REASON_LENGTH:
        logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, -1].float()
        natural = torch.log_softmax(logits, -1)
        token = int(torch.multinomial(natural.exp(), 1, generator=draw))
        tokens.append(token)
        logprobs.append(float(natural[token]))
        if token in (params.get("stop") or ()):
            reason = proto.STOP_REASON_STOP
    answer = proto.SampleResponse()
    answer.sequences.add(
        stop_reason=reason,
        tokens=np.array(tokens, "<i4").tobytes(),
        logprobs=np.array(logprobs, "<f4").tobytes(),
    )
    return bytes(answer.SerializeToString())


class Service:
    """All sessions, models and saved weights. Calls compute one after the other, in a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = count(1)
        self._trainings: dict[str, Training] = {}
        self._saved: dict[str, dict[str, Any]] = {}
        self._samplers: dict[str, Any] = {}
        self._results: dict[str, asyncio.Task[Any]] = {}
        self._turn = asyncio.Lock()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        calls = {name.removeprefix("on_"): name for name in dir(self) if name.startswith("on_")}
        for path, name in calls.items():
            app.router.add_post(f"/api/v1/{path.replace('__', '/')}", self._handler(name))
        app.router.add_get("/api/v1/samplers/{name}", self._describe_sampler)
        app.router.add_post("/api/v1/sessions/{name}/finish", self._handler("on_telemetry"))
        return app

    async def _describe_sampler(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        return web.json_response({"sampler_id": name, "base_model": "tiny"})

    def _handler(self, name: str) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.Response:
            is_proto = request.content_type == "application/x-protobuf"
            body = await (request.read() if is_proto else request.json())
            answer = await getattr(self, name)(body)
            if isinstance(answer, bytes):
                return web.Response(body=answer, content_type="application/x-protobuf")
            return web.json_response(answer)

        return handle

    def _promise(self, compute: Callable[[], Any], **more: Any) -> dict[str, Any]:
        async def run() -> Any:
            async with self._turn:
                try:
                    return await asyncio.to_thread(compute)
                except Exception as error:
                    return {"error": repr(error), "category": "user"}

        name = f"request-{next(self._numbers)}"
        self._results[name] = asyncio.create_task(run())
        return {"request_id": name, **more}

    async def on_retrieve_future(self, body: Any) -> Any:
        return await self._results[body["request_id"]]

    async def on_client__config(self, body: Any) -> Any:
        return {"use_pyqwest_transport": False}

    async def on_client__dynamic_config(self, body: Any) -> Any:
        return {"sample_cancel_enabled": True}

    async def on_create_session(self, body: Any) -> Any:
        return {"session_id": f"session-{next(self._numbers)}"}

    async def on_session_heartbeat(self, body: Any) -> Any:
        return {}

    on_finish_session = on_telemetry = on_session_heartbeat

    async def on_cancel_future(self, body: Any) -> Any:
        self._results[body["request_id"]].cancel()
        return {}

    async def on_create_model(self, body: Any) -> Any:
        model_id = f"{body['session_id']}:train:{body['model_seq_id']}"

        def create() -> Any:
            self._trainings[model_id] = Training(self._folder)
            return {"model_id": model_id}

        return self._promise(create)

    async def on_load_weights(self, body: Any) -> Any:
        model_id = f"{body['session_id']}:train:{body['model_seq_id']}"
        assert body["optimizer"]

        def load() -> Any:
            self._trainings[model_id] = Training(self._folder, self._saved[body["path"]])
            return {"model_id": model_id, "path": body["path"]}

        return self._promise(load)

    async def on_get_info(self, body: Any) -> Any:
        return {"model_id": body["model_id"], "model_data": {"model_name": "tiny"}, "is_lora": True}

    async def on_forward_backward(self, body: bytes) -> Any:
        request = proto.ForwardBackwardRequest.FromString(body)
        return self._promise(lambda: self._trainings[request.model_id].forward_backward(request))

    async def on_optim_step(self, body: Any) -> Any:
        return self._promise(lambda: self._trainings[body["model_id"]].step(body["adam_params"]))

    async def on_save_weights(self, body: Any) -> Any:
        return self._save(body, "weights")

    async def on_save_weights_for_sampler(self, body: Any) -> Any:
        return self._save(body, "sampler_weights")

    def _save(self, body: Any, kind: str) -> Any:
        path = f"tinker://{body['model_id']}/{kind}/{body['path']}"

        def save() -> Any:
            self._saved[path] = self._trainings[body["model_id"]].state()
            return {"path": path}

        return self._promise(save)

    async def on_create_sampling_session(self, body: Any) -> Any:
        name = f"{body['session_id']}:sample:{body['sampling_session_seq_id']}"
        path = body.get("model_path")
        if path and path not in self._saved:
            raise web.HTTPNotFound(text=f'{{"detail": "no weights {path}"}}')
        self._samplers[name] = Training(self._folder, self._saved.get(path)).model
        return {"sampling_session_id": name}

    async def on_asample(self, body: Any) -> Any:
        model = self._samplers[body["sampling_session_id"]]
        name = f"{body['sampling_session_id']}:{body['seq_id']}"
        return self._promise(lambda: sample(model, body), sample_sequence_ids=[name])


def tensor_of(tensor: Any) -> torch.Tensor:
    return torch.tensor(np.frombuffer(tensor.dense, DTYPES[tensor.dtype]))


def clone(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: clone(each) for name, each in value.items()}
    return value.clone() if isinstance(value, torch.Tensor) else value


async def serve(folder: Path, port_file: Path) -> None:
    runner = web.AppRunner(Service(folder).app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port_file.write_text(str(runner.addresses[0][1]), encoding="utf-8")
    await asyncio.Event().wait()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(serve(Path(sys.argv[1]), Path(sys.argv[2])))
