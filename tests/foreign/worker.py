"""A whole rollout worker that imports nothing of rolloutmq: producer_workers/PROTOCOL.md in code. Copy it, and go on.

    rolloutmq scripts --json > scripts.json
    python worker.py redis://localhost my_run scripts.json my-worker

Where `respond` is, put your engine and your judge. One group at a time, on a single server, uncompressed.
"""

import json
import secrets
import signal
import sys
import time
import zlib
from array import array
from pathlib import Path

import msgpack
import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

NUMBERS = ("rate", "failed", "judged", "judging_ms", "judge_failures", "judge_p50_ms", "judge_p99_ms")
NOTHING_TO_SAY = {"concurrency": 1, "requests": "", **dict.fromkeys(NUMBERS, 0)}  # for people


class Abort(Exception):
    """The group in work goes back as it came; where its lease is lost, the server knows already."""


class Worker:
    def __init__(self, url, run, scripts, name, token_s="0.001"):
        # what an outage cut off is sent again as it was, which does no harm
        self.redis, self.prefix = redis.Redis.from_url(url, retry=Retry(ConstantBackoff(0.2), -1)), f"rmq:{{{run}}}:"
        self.scripts = json.loads(Path(scripts).read_text(encoding="utf-8"))["scripts"]
        self.code = {name: self.redis.register_script(script["source"]) for name, script in self.scripts.items()}
        limits = self.redis.hgetall(self.prefix + "meta").items()
        self.limits = {name.decode(): json.loads(value) for name, value in limits if name != b"nonce"}
        self.limits |= {"worker": name, "nonce": secrets.token_hex(16)}
        self.token_s, self.stopping = float(token_s), False
        self.due = self.ack = self.done = 0
        self.hear(self.call("register")[2:])
        self.weights = self.state["weights"]  # load what is at state["path"]: here, and in `tick`

    def call(self, script, task="", keys=(), more=(), **values):
        """Run a script: keys and arguments as its header names them, then `keys` and `more`. Limits are known."""
        header, values = self.scripts[script], {**self.limits, **values}
        fixed = [slot["key"].replace("<task>", task) for slot in header["keys"] if not slot["tail"]]
        names = [self.prefix + key.replace("<worker>", values["worker"]) for key in (*fixed, *keys)]
        args = [values.get(slot["names"][0], "") for slot in header["args"] if not slot["tail"]]
        return [part.decode() if isinstance(part, bytes) else part for part in self.code[script](names, [*args, *more])]

    def hear(self, fields):
        self.state = dict(zip(("epoch", "mode", "lanes", "weights", "path", "checksum"), fields, strict=False))

    def beat(self, held):
        """A sign of life, with (gid, token) of the group in work; raises Abort where its lease is lost."""
        now = {"ack": self.ack, "weights": self.weights, "state": "working" if held else "idle", "done": self.done}
        reply = self.call("heartbeat", more=held, **now, **NOTHING_TO_SAY)
        self.due = time.monotonic() + self.limits["heartbeat_ms"] / 1000
        if reply[0] == "REPLACED":
            sys.exit("another process has this name")
        self.hear((reply if reply[0] == "OK" else self.call("register")[1:])[1:7])  # else the server forgot us
        if held and (reply[0] != "OK" or len(reply) > 7):
            raise Abort

    def tick(self, held=()):
        """Between any two tokens or groups: beat when it is time, do what the run says, then acknowledge it."""
        while True:
            if time.monotonic() >= self.due:
                self.beat(held)
            mode, epoch = self.state["mode"], int(self.state["epoch"])
            if held and (mode == "abort" or (mode == "keep" and self.stopping)):
                raise Abort
            if mode == "run" or not held:
                self.weights = self.state["weights"]
            if self.ack != epoch and (mode in ("run", "keep") or not held):
                self.ack, self.due = epoch, 0  # the receipt, at once
            elif mode != "keep" or self.stopping:
                return
            else:
                time.sleep(0.01)  # frozen

    def run(self):
        while not self.stopping and self.state["mode"] != "finish":
            self.tick()
            if not (self.state["lanes"] and self.work()):
                time.sleep(0.05)  # or BLPOP bell:workers
        self.tick()
        self.call("deregister")

    def work(self):
        """Claim one group and hand it in; False where there is none."""
        lanes = [(task, lane) for lane in ("eval", "resume", "fresh") for task in self.limits["tasks"]]
        keys = [key for task, lane in lanes for key in (f"jobs:{task}:{lane}", f"progress:{task}")]
        now = {"token": secrets.token_hex(16), "weights": self.weights, "limit": 1}
        marks = {"low": self.limits["low_bytes"], "high": self.limits["high_bytes"]}
        reply = self.call("claim", keys=keys, more=[lane for _, lane in lanes], **now, **marks)
        if reply[0] != "OK" or len(reply) < 8:  # PAUSED, STALE, FULL, UNKNOWN: the heartbeat will tell
            return False
        gid, task, token = reply[7], reply[7].rpartition("-")[0], now["token"]
        try:
            self.submit(gid, task, token, self.make(gid, token))
        except (Abort, ValueError, KeyError) as error:
            kind, reason = "aborted" if isinstance(error, Abort) else "failed", json.dumps({"reason": str(error)})
            self.call("release", task, gid=gid, token=token, kind=kind, reason=reason)
        return True

    def make(self, gid, token):
        """The finished document of a group: its prompt's, with responses."""
        group = msgpack.unpackb(self.redis.get(f"{self.prefix}payload:{gid}:init"))
        prompt = array("i", group["columns"]["prompt_ids"]["data"])
        ids, logprobs, lengths = array("i"), array("f"), array("i")
        for member in group["members"]:
            tokens, spans = self.respond(prompt, member["sample"], (gid, token))
            ids.extend(tokens)
            logprobs.extend([-1.0] * len(tokens))
            lengths.append(len(tokens))
            reward = {"score": float(sum(tokens) % 2)}
            member.update(status="completed", finish_reason="length", spans=spans, reward=reward, response=str(tokens))
        for name, column in (("response_ids", ids), ("logprobs", logprobs), ("lengths", lengths)):
            group["columns"][name]["data"] = column.tobytes()
        return group

    def respond(self, prompt, sample, held):
        """(tokens, spans of [start, length, version, lineage]): each token with the weights that really made it."""
        tokens, spans = [], []
        while len(tokens) < sample["max_tokens"]:
            time.sleep(self.token_s)
            self.tick(held)
            lineage, _, version = self.weights.rpartition(":")
            if not spans or spans[-1][2:] != [int(version), lineage]:
                spans.append([len(tokens), 0, int(version), lineage])
            spans[-1][1] += 1
            tokens.append((prompt[-1] + len(tokens)) % 100)
        return tokens, spans

    def submit(self, gid, task, token, group):
        """The bytes first, under the token; then the script that counts and keeps them."""
        data, members = msgpack.packb(group), group["members"]
        rewards = [member["reward"]["score"] for member in members]
        spans = [span for member in members for span in member["spans"]]
        parts = [data[at : at + 1_048_000] for at in range(0, len(data), 1_048_000)]
        chunks = {f"payload:{gid}:{token}" + (f":{n}" if n else ""): part for n, part in enumerate(parts)}
        facts = {"gid": gid, "token": token, "status": "completed", "samples": len(members), "chunks": len(chunks)}
        facts |= {"tokens": sum(span[1] for span in spans), "size": len(data), "crc": f"{zlib.crc32(data):08x}"}
        facts |= {"reward_sum": sum(rewards), "reward_count": len(rewards)}
        facts["order"] = "arrival" if self.limits["order"] == "fifo" else ""
        oldest = [part for made_by in {(span[3], span[2]) for span in spans} for part in ("oldest", *made_by)]
        answer = ["MISSING"]
        while answer[0] == "MISSING":
            for name, chunk in chunks.items():
                self.redis.set(self.prefix + name, chunk, ex=3600)
            answer = self.call("submit", task, chunks, oldest, **facts)
        self.done += answer[0] == "OK"  # FENCED: somebody else has the group, this result is not wanted


if __name__ == "__main__":
    worker = Worker(*sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: setattr(worker, "stopping", True))
    worker.run()
