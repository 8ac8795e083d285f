"""A whole rollout worker that imports nothing of rolloutmq: producer_workers/PROTOCOL.md in code. Copy it, and go on.

    rolloutmq scripts --json > scripts.json
    python worker.py redis://localhost my_run scripts.json my-worker

Where `respond` is, put your engine and your judge. For a single server, without compression and partial rollout.
"""

import json
import secrets
import signal
import sys
import threading
import time
import zlib
from array import array
from pathlib import Path

import msgpack
import redis

LOST = (redis.ConnectionError, redis.TimeoutError)
KEYS = {  # the slots of a script's header that are not called like their key; {0} is the task
    "worker": "worker:{id}", "holds": "holds:{id}", "groups": "group:", "bell": "bell:receipts",
    "dead_letters": "dead:", "ledger": "ledger:train", "progress": "progress:{0}", "completed": "pool:{0}:completed",
    "order": "order:{0}:completed", "aborted": "pool:{0}:aborted", "expired": "pool:{0}:expired",
    "filtered": "ended:{0}:filtered",
    "jobs_resume": "jobs:{0}:resume", "jobs_eval": "jobs:{0}:eval", "bell_workers": "bell:workers",
    "bell_producer": "bell:producer", "bell_trainer": "bell:trainer",
}  # fmt: skip


class Abort(Exception):
    """The group in work goes back as it came; where the lease is lost, the server knows already."""


class Worker:
    def __init__(self, url, run, scripts, name, token_s="0.001"):
        self.redis, self.prefix = redis.Redis.from_url(url), f"rmq:{{{run}}}:"
        self.id, self.token_s = name, float(token_s)
        self.nonce, self.wake, self.stopping, self.held = secrets.token_hex(16), threading.Event(), False, {}
        self.ack = self.done = 0
        self.scripts = json.loads(Path(scripts).read_text(encoding="utf-8"))["scripts"]
        names = ("lease_ms", "heartbeat_ms", "max_tries", "low_bytes", "high_bytes", "order", "tasks")
        self.limits = {n: json.loads(self.redis.hget(self.prefix + "meta", n)) for n in names}
        self.hear(self.call("register", "", [self.id, self.nonce, "engine", "foreign"])[2:])
        self.weights = self.state["weights"]  # load what is at state["path"]: here, and in `obey`

    def call(self, name, task, args, tail=()):
        """Run a script until it is answered: each may be sent again when only its answer was lost."""
        script = self.scripts[name]
        slots = [slot["names"][0] for slot in script["keys"] if not slot["tail"]]
        keys = [KEYS.get(slot, slot).format(task, id=self.id) for slot in slots]
        keys = [self.prefix + key for key in [*keys, *tail]]
        while True:
            try:
                try:
                    reply = self.redis.evalsha(script["sha"], len(keys), *keys, *args)
                except redis.exceptions.NoScriptError:
                    reply = self.redis.eval(script["source"], len(keys), *keys, *args)
                return [part.decode() if isinstance(part, bytes) else part for part in reply]
            except LOST:
                time.sleep(0.2)

    def hear(self, fields):
        self.state = dict(zip(("epoch", "mode", "lanes", "weights", "path", "checksum"), fields, strict=False))

    def beat(self):
        """Signs of life, on a thread of their own: leases go on while the engine works. `wake` brings one early."""
        while not self.stopping:
            held = list(self.held.items())
            about = [self.limits["lease_ms"], self.ack, self.weights, "working" if held else "idle", 0, self.done, 1]
            about += ["", 0, 0, 0]  # requests in the engine, failures, judgements and their milliseconds: for people
            pairs = [part for pair in held for part in pair]
            reply = self.call("heartbeat", "", [self.id, self.nonce, *about, *pairs])
            if reply[0] == "OK":
                self.hear(reply[1:7])
                for number in reply[7:]:
                    self.held.pop(held[int(number) - 1][0], None)  # lost
            elif reply[0] == "UNKNOWN":  # the server forgot us, and our leases
                self.held.clear()
                self.call("register", "", [self.id, self.nonce])
            else:  # REPLACED: another process has our name
                self.stopping = True
            self.wake.wait(self.limits["heartbeat_ms"] / 1000)
            self.wake.clear()

    def obey(self, gid=None):
        """Between any two steps: do what the control state says; `ack` is the receipt, sent once it is done."""
        while self.state["mode"] == "keep" and not self.stopping:  # frozen
            self.receipt()
            time.sleep(0.01)
        if gid and (self.state["mode"] == "abort" or self.held.get(gid) is None):
            raise Abort
        if self.state["mode"] == "run" or not gid:  # in abort, drain and finish only with empty hands
            self.weights = self.state["weights"]
            self.receipt()

    def receipt(self):
        if self.ack != int(self.state["epoch"]):
            self.ack = int(self.state["epoch"])
            self.wake.set()

    def run(self):
        beating = threading.Thread(target=self.beat)
        beating.start()
        while not self.stopping and self.state["mode"] != "finish":
            self.obey()
            if not (self.state["lanes"] and self.work()):
                time.sleep(0.05)  # or BLPOP bell:workers
        self.stopping = True
        self.wake.set()
        beating.join()
        self.call("deregister", "", [self.id, self.nonce])

    def work(self):
        """Claim one group and hand it in; False where there is none."""
        lanes = [(task, lane) for lane in ("eval", "resume", "fresh") for task in self.limits["tasks"]]
        pairs = [key for task, lane in lanes for key in (f"jobs:{task}:{lane}", f"progress:{task}")]
        token, bounds = secrets.token_hex(16), [self.limits[n] for n in ("lease_ms", "low_bytes", "high_bytes")]
        bounds.insert(1, 1)  # groups at most
        args = [self.id, self.nonce, token, self.weights, *bounds, *(lane for _, lane in lanes)]
        reply = self.call("claim", "", args, pairs)
        if reply[0] != "OK" or len(reply) < 8:  # PAUSED, STALE, FULL, UNKNOWN: the heartbeat will tell
            return False
        gid, task = reply[7], reply[7].rpartition("-")[0]
        self.held[gid] = token
        try:
            self.submit(gid, token, self.make(gid))
        except (Abort, ValueError, KeyError) as error:
            kind, letter = "aborted" if isinstance(error, Abort) else "failed", json.dumps({"reason": str(error)})
            self.call("release", task, [gid, token, kind, self.limits["max_tries"], letter, "", ""])
        finally:
            self.held.pop(gid, None)
        return True

    def make(self, gid):
        """The finished document of a group: its prompt's, with responses."""
        group = msgpack.unpackb(self.redis.get(f"{self.prefix}payload:{gid}:init"))
        prompt = array("i", group["columns"]["prompt_ids"]["data"])
        ids, logprobs, lengths = array("i"), array("f"), array("i")
        for member in group["members"]:
            tokens, spans = self.respond(gid, prompt, member["sample"])
            ids.extend(tokens)
            logprobs.extend([-1.0] * len(tokens))
            lengths.append(len(tokens))
            reward = {"score": float(sum(tokens) % 2)}
            member.update(status="completed", finish_reason="length", spans=spans, reward=reward, response=str(tokens))
        for name, column in (("response_ids", ids), ("logprobs", logprobs), ("lengths", lengths)):
            group["columns"][name]["data"] = column.tobytes()
        return group

    def respond(self, gid, prompt, sample):
        """(tokens, spans of [start, length, version, lineage]): each token with the weights that really made it."""
        tokens, spans = [], []
        while len(tokens) < sample["max_tokens"]:
            time.sleep(self.token_s)
            self.obey(gid)
            lineage, _, version = self.weights.rpartition(":")
            if not spans or spans[-1][2:] != [int(version), lineage]:
                spans.append([len(tokens), 0, int(version), lineage])
            spans[-1][1] += 1
            tokens.append((prompt[-1] + len(tokens)) % 100)
        return tokens, spans

    def submit(self, gid, token, group):
        """The bytes first, under the token; then the script that counts and keeps them."""
        task, data = group["task"], msgpack.packb(group)
        chunks = [data[at : at + 1_048_000] for at in range(0, len(data), 1_048_000)]
        names = [f"payload:{gid}:{token}" + (f":{n}" if n else "") for n in range(len(chunks))]
        made_by = {(span[3], span[2]) for member in group["members"] for span in member["spans"]}
        rewards = [member["reward"]["score"] for member in group["members"]]
        tokens = len(group["columns"]["response_ids"]["data"]) // 4
        place = "arrival" if self.limits["order"] == "fifo" else ""
        args = [gid, token, "completed", len(rewards), tokens, len(data), f"{zlib.crc32(data):08x}"]
        args += [sum(rewards), len(rewards), place, "", len(chunks)]
        args += [part for made in made_by for part in ("oldest", *made)]
        answer = ["MISSING"]
        while answer[0] == "MISSING":
            try:
                for name, chunk in zip(names, chunks, strict=True):
                    self.redis.set(self.prefix + name, chunk, ex=3600)
                answer = self.call("submit", task, args, names)
            except LOST:
                time.sleep(0.2)
        self.done += answer[0] == "OK"  # FENCED: somebody else has the group, this result is not wanted


if __name__ == "__main__":
    worker = Worker(*sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: setattr(worker, "stopping", True))
    worker.run()
