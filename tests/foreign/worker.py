"""A whole rollout worker that imports nothing of rolloutmq: producer_workers/PROTOCOL.md in code.
Copy it, and go on.

    python -m buffer.redis.script_list > scripts.json
    python worker.py redis://localhost my_run scripts.json my-worker

Where `respond` is, put your engine and your judge. One group at a time, on a single server,
uncompressed. `hold` is for tests: a file with the number of tokens that a response may have for
now.
`worker.mjs` is the same in JavaScript.
"""

import json
import signal
import sys
import time
import zlib
from array import array
from hashlib import sha1
from pathlib import Path
from secrets import token_hex

import msgpack
import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

CHUNK, LANES = 1_048_000, ("eval", "resume", "fresh")


class Abort(Exception):
    """The group in work goes back as it came; where its lease is lost, the server knows already."""


class Worker:
    def __init__(self, url, run, scripts, name, hold=""):
        # what an outage cut off is sent again as it was, which does no harm
        self.redis = redis.Redis.from_url(url, retry=Retry(ConstantBackoff(0.2), -1))
        self.prefix = f"rmq:{{{run}}}:"
        self.scripts = json.loads(Path(scripts).read_text(encoding="utf-8"))["scripts"]
        self.stopping = False
        self.hold = hold
        self.due = 0
        self.done = 0
        limits = self.redis.hgetall(self.prefix + "meta")
        self.facts = {
            name.decode(): json.loads(value)
            for name, value in limits.items()
            if name not in (b"nonce", b"limits_op") and value != b"null"  # null: not set
        }
        self.facts |= {"worker": name, "nonce": token_hex(16), "ack": 0, "report": "done=0"}
        self.hear(self.call("register")[2:8])

    def call(self, script, task="", keys=(), more=(), unit=(), **facts):
        """Run a script: its keys and arguments as scripts.json names them, then `keys` and `more`.
        `unit`: the arguments of the tail, by name.
        """
        header = self.scripts[script]
        facts = {**self.facts, "task": task, "message": "", "retryable": 0, **facts}
        fixed = [slot["key"].replace("<task>", task) for slot in header["keys"] if not slot["tail"]]
        names = [self.prefix + key.replace("<worker>", facts["worker"]) for key in (*fixed, *keys)]
        args = [
            facts.get(slot["names"][0], slot.get("default"))
            for slot in header["args"]
            if not slot["tail"]
        ]
        if unit:
            (tail,) = [slot for slot in header["args"] if slot["tail"]]
            rest = zip(tail["names"], tail["defaults"], strict=True)
            args += [unit.get(name, default) for name, default in rest]
        reply = self.redis.register_script(header["source"])(names, [*args, *more])
        return [part.decode() if isinstance(part, bytes) else part for part in reply]

    def hear(self, control):
        self.epoch, self.mode, self.lanes, weights, self.path, *_ = int(control[0]), *control[1:]
        if self.mode == "run" or "weights" not in self.facts:
            self.facts["weights"] = weights  # load what is at self.path, then say that it is loaded

    def beat(self, held):
        """A sign of life, with number and digest of what is held: (gid, token) of the group in
        work, whose age it does not report. Raises Abort where that group is not its own any more.
        """
        digest = int(sha1(" ".join(held).encode()).hexdigest()[:10], 16) if held else 0
        state = "working" if held else "idle"
        reply = self.call("heartbeat", held=1 if held else 0, digest=digest, state=state)
        self.due = time.monotonic() + self.facts["heartbeat_ms"] / 1000
        if reply[0] == "REPLACED":
            sys.exit("another process has this name")
        is_known = reply[0] != "UNKNOWN"
        self.hear(reply[1:10] if is_known else self.call("register")[2:11])
        if reply[0] == "DIFFERS":
            is_known = self.call("reconcile", more=held, limit=200) == ["OK"]
        if held and not is_known:
            raise Abort

    def tick(self, held=()):
        """Between any two tokens or groups: beat when it is time, do what the run says, then
        acknowledge it.
        """
        while True:
            if time.monotonic() >= self.due:
                self.beat(held)
            if held and (self.mode == "abort" or (self.mode == "keep" and self.stopping)):
                raise Abort
            if self.facts["ack"] != self.epoch and (self.mode in ("run", "keep") or not held):
                self.facts["ack"], self.due = self.epoch, 0  # the receipt, at once
            elif self.mode != "keep" or self.stopping:
                return
            else:
                time.sleep(0.01)  # frozen

    def run(self):
        while not self.stopping and self.mode != "finish":
            self.tick()
            if not (self.lanes and self.work()):
                time.sleep(0.05)  # or BLPOP bell:workers
        self.tick()
        self.call("deregister")

    def work(self):
        """Claim one group and hand it in; False where there is none, or none may start: the
        heartbeat will tell.
        """
        served = [(task, lane) for lane in LANES for task in self.facts["tasks"]]
        keys = [key for task, lane in served for key in (f"jobs:{task}:{lane}", f"progress:{task}")]
        token = token_hex(16)
        reply = self.call(
            "claim", keys=keys, more=[lane for _, lane in served], token=token, limit=1
        )
        if reply[0] != "OK" or len(reply) < 11:
            return False
        gid = reply[10]
        task = gid.rpartition("-")[0]
        try:
            self.submit(gid, task, token, *self.make(gid, token))
        except (Abort, ValueError, KeyError) as error:
            kind = "aborted" if isinstance(error, Abort) else "failed"
            message = str(error)
            reason = json.dumps({"reason": message})
            self.call(
                "release", task, gid=gid, token=token, kind=kind, reason=reason, message=message
            )
        return True

    def make(self, gid, token):
        """The finished document of a group, with its spans and scores: its prompt's, with
        responses.
        """
        group = msgpack.unpackb(self.redis.get(f"{self.prefix}payload:{gid}:init"))
        count = len(group["responses"])
        offset, size = group["columns"]["prompt_ids"]
        prompt = array("i", group["data"][offset : offset + 4 * size])
        ids, spans, scores, lengths = [], [], [], []
        for n in range(count):
            tokens, made_by = self.respond(prompt, group["shared"]["sample"], (gid, token))
            ids += tokens
            spans += [(n, *span) for span in made_by]
            scores.append(float(sum(tokens) % 2))
            lengths.append(len(tokens))
            group["responses"][n] = str(tokens)
        lineages = sorted({span[4] for span in spans})
        group |= {"lineages": lineages, "rewards": ["score"], "finish_reasons": ["length"]}
        rows = [number for *own, name in spans for number in (*own, lineages.index(name))]
        columns = {
            "spans": ("q", rows, 5),
            "rewards": ("d", scores, 1),
            "indices": ("i", range(count)),
            "lengths": ("i", lengths),
            "prompt_ids": ("i", prompt),
            "response_ids": ("i", ids),
            "logprobs": ("f", [-1.0] * len(ids)),
            "statuses": ("B", [1] * count),  # completed
            "finishes": ("B", [0] * count),
        }
        group["columns"], data = {}, b""
        for name, (kind, numbers, *width) in columns.items():
            size = len(numbers)
            group["columns"][name] = (
                [len(data), size // width[0], *width] if width else [len(data), size]
            )
            data += array(kind, numbers).tobytes()
            data += bytes(-len(data) % 8)
        group["data"] = data
        return group, spans, scores

    def respond(self, prompt, sample, held):
        """(tokens, spans of [start, length, version, lineage]): each token with the weights that
        really made it.
        """
        tokens, spans = [], []
        while len(tokens) < sample["max_tokens"]:
            self.tick(held)
            if self.hold and len(tokens) >= int(Path(self.hold).read_text()):
                time.sleep(0.01)
                continue
            lineage, _, version = self.facts["weights"].rpartition(":")
            if not spans or spans[-1][2:] != [int(version), lineage]:
                spans.append([len(tokens), 0, int(version), lineage])
            spans[-1][1] += 1
            tokens.append((prompt[-1] + len(tokens)) % 100)
        return tokens, spans

    def submit(self, gid, task, token, group, spans, scores):
        """The bytes first, under the token; then the script that counts and keeps them."""
        data = msgpack.packb(group)
        weights = {(span[4], span[3]) for span in spans}
        starts = range(0, len(data), CHUNK)
        keys = [f"payload:{gid}:{token}" + (f":{n}" if n else "") for n in range(len(starts))]
        unit = {
            "gid": gid, "token": token, "status": "completed", "samples": len(scores),
            "chunks": len(keys),
        }  # fmt: skip
        unit |= {
            "tokens": sum(span[2] for span in spans),
            "length": sum(span[2] for span in spans),
            "size": len(data),
            "crc": f"{zlib.crc32(data):08x}",
        }
        unit |= {"reward_sum": sum(scores), "reward_count": len(scores)}
        unit["made_by"] = ",".join(f"oldest {lineage} {version}" for lineage, version in weights)
        answer = ["MISSING"]
        while answer[0] == "MISSING":
            for key, start in zip(keys, starts, strict=True):
                self.redis.set(self.prefix + key, data[start : start + CHUNK], ex=3600)
            answer = self.call("submit", task, keys, unit=unit)
        self.done += answer[0] == "OK"  # FENCED: somebody else has the group
        self.facts["report"] = f"done={self.done} concurrency=1"


if __name__ == "__main__":
    worker = Worker(*sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: setattr(worker, "stopping", True))
    worker.run()
