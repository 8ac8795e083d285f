// A whole rollout worker in JavaScript: producer_workers/PROTOCOL.md in code, without Python. Copy it, and go on.
//
//     python -m buffer.redis.script_list > scripts.json
//     node worker.mjs redis://localhost my_run scripts.json my-worker
//
// Where `respond` is, put your engine and your judge. One group at a time, on a single server, uncompressed. `hold` is for
// tests: a file with the number of tokens that a response may have for now.

import { createHash, randomBytes } from "node:crypto";
import { readFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { crc32 } from "node:zlib";
import { decode, encode } from "@msgpack/msgpack";
import { Redis } from "ioredis";

const [url, run, scriptsFile, name, hold] = process.argv.slice(2);
const CHUNK = 1_048_000, LANES = ["eval", "resume", "fresh"], prefix = `rmq:{${run}}:`;
const newToken = () => randomBytes(16).toString("hex");

// what an outage cut off is sent again as it was, which does no harm
const again = { maxRetriesPerRequest: null, retryStrategy: () => 200 };
const redis = new Redis(url.startsWith("unix:") ? new URL(url).pathname : url, again);
redis.on("error", () => {}); // it tries again, for ever
const scripts = JSON.parse(readFileSync(scriptsFile, "utf8")).scripts;
for (const script of ["register", "heartbeat", "reconcile", "claim", "submit", "release", "deregister"])
  redis.defineCommand(script, { lua: scripts[script].source });

// The group in work goes back as it came; where its lease is lost, the server knows already.
class Abort extends Error {}

const facts = { worker: name, nonce: newToken(), ack: 0, report: "concurrency=1" };
let stopping = false, due = 0, done = 0, epoch, mode, lanes, path;

// Run a script: its keys and arguments as scripts.json names them, then `keys` and `more`. `unit`: those of the tail, by name.
async function call(script, { task = "", keys = [], more = [], unit, ...own } = {}) {
  const header = scripts[script], known = { ...facts, task, message: "", retryable: 0, ...own };
  const fixed = header.keys.filter((slot) => !slot.tail).map((slot) => slot.key.replace("<task>", task));
  const names = [...fixed, ...keys].map((key) => prefix + key.replace("<worker>", name));
  const args = header.args.filter((slot) => !slot.tail).map((slot) => known[slot.names[0]] ?? slot.default);
  const tail = unit && header.args.find((slot) => slot.tail);
  const units = tail ? tail.names.map((name, n) => unit[name] ?? tail.defaults[n]) : [];
  return redis[script](names.length, ...names, ...args, ...units, ...more);
}

function hear([newEpoch, newMode, newLanes, weights, newPath]) {
  [epoch, mode, lanes, path] = [Number(newEpoch), newMode, newLanes, newPath];
  if (mode === "run" || !facts.weights) facts.weights = weights; // load what is at `path`, then say that it is loaded
}

// A sign of life, with number and digest of what is held: gid and token of the group in work, whose age it does not report.
// Throws Abort where that group is not its own any more.
async function beat(held) {
  const hash = createHash("sha1").update(held.join(" ")).digest("hex"), count = held.length ? 1 : 0;
  const digest = count && parseInt(hash.slice(0, 10), 16);
  const reply = await call("heartbeat", { held: count, digest, state: count ? "working" : "idle" });
  due = performance.now() + facts.heartbeat_ms;
  if (reply[0] === "REPLACED") process.exit(1); // another process has this name
  let isKnown = reply[0] !== "UNKNOWN";
  hear(isKnown ? reply.slice(1) : (await call("register")).slice(2));
  if (reply[0] === "DIFFERS") isKnown = (await call("reconcile", { more: held, limit: 200 })).join() === "OK";
  if (count && !isKnown) throw new Abort("the lease is lost");
}

// Between any two tokens or groups: beat when it is time, do what the run says, then acknowledge it.
async function tick(held = []) {
  for (;;) {
    if (performance.now() >= due) await beat(held);
    if (held.length && (mode === "abort" || (mode === "keep" && stopping))) throw new Abort(mode);
    if (facts.ack !== epoch && (mode === "run" || mode === "keep" || !held.length)) {
      [facts.ack, due] = [epoch, 0]; // the receipt, at once
    } else if (mode !== "keep" || stopping) return;
    else await sleep(10); // frozen
  }
}

// Claim one group and hand it in; false where there is none, or none may start: the heartbeat will tell.
async function work() {
  const served = LANES.flatMap((lane) => Object.keys(facts.tasks).map((task) => [task, lane]));
  const keys = served.flatMap(([task, lane]) => [`jobs:${task}:${lane}`, `progress:${task}`]);
  const token = newToken();
  const reply = await call("claim", { keys, more: served.map(([, lane]) => lane), token, limit: 1 });
  if (reply[0] !== "OK" || reply.length < 11) return false;
  const gid = reply[10], task = gid.slice(0, gid.lastIndexOf("-"));
  try {
    await submit(gid, task, token, ...(await make(gid, token)));
  } catch (error) {
    const kind = error instanceof Abort ? "aborted" : "failed";
    const message = String(error).slice(0, 1000);
    await call("release", { task, gid, token, kind, message, reason: JSON.stringify({ reason: message }) });
  }
  return true;
}

// The finished document of a group, with its spans and scores: its prompt's, with responses.
async function make(gid, token) {
  // BigInt: what is in the prompt's `extra` goes back as it was, integers beyond 2^53, too
  const document = await redis.getBuffer(`${prefix}payload:${gid}:init`);
  const group = decode(document, { useBigInt64: true });
  const [offset, size] = group.columns.prompt_ids.map(Number);
  const prompt = new Int32Array(new Uint8Array(group.data.subarray(offset, offset + 4 * size)).buffer); // a copy, which is aligned
  const ids = [], lengths = [], spans = [], scores = [];
  for (const n of group.responses.keys()) {
    const [tokens, made] = await respond(prompt, group.shared.sample, [gid, token]);
    ids.push(...tokens);
    lengths.push(tokens.length);
    spans.push(...made.map((span) => [n, ...span]));
    scores.push(tokens.reduce((sum, id) => sum + id, 0) % 2);
    group.responses[n] = tokens.join(" ");
  }
  const lineages = [...new Set(spans.map((span) => span[4]))], count = lengths.length;
  const rows = spans.flatMap(([n, start, length, version, lineage]) => [n, start, length, version, lineages.indexOf(lineage)]);
  const columns = { // little-endian, as every machine is
    spans: [BigInt64Array.from(rows.map(BigInt)), 5], rewards: [Float64Array.from(scores), 1],
    indices: [Int32Array.from(lengths.keys())], lengths: [Int32Array.from(lengths)], prompt_ids: [prompt],
    response_ids: [Int32Array.from(ids)], logprobs: [new Float32Array(ids.length).fill(-1)],
    statuses: [new Uint8Array(count).fill(1)], finishes: [new Uint8Array(count)], // completed; finish_reasons[0]
  };
  const pieces = [];
  let at = 0;
  group.columns = {};
  for (const [name, [column, width]] of Object.entries(columns)) {
    group.columns[name] = width ? [at, column.length / width, width] : [at, column.length];
    const padding = Buffer.alloc((8 - (column.byteLength % 8)) % 8);
    pieces.push(Buffer.from(column.buffer, column.byteOffset, column.byteLength), padding);
    at += column.byteLength + padding.length;
  }
  const named = { lineages, rewards: ["score"], finish_reasons: ["length"] };
  return [{ ...group, ...named, data: Buffer.concat(pieces) }, spans, scores];
}

// [tokens, spans of [start, length, version, lineage]]: each token with the weights that really made it.
async function respond(prompt, sample, held) {
  const tokens = [], spans = [];
  while (tokens.length < sample.max_tokens) {
    await tick(held);
    if (hold && tokens.length >= Number(readFileSync(hold, "utf8"))) {
      await sleep(10);
      continue;
    }
    const [lineage, number] = facts.weights.split(":"), version = Number(number), last = spans.at(-1);
    if (last?.[2] !== version || last?.[3] !== lineage) spans.push([tokens.length, 0, version, lineage]);
    spans.at(-1)[1] += 1;
    tokens.push((prompt.at(-1) + tokens.length) % 100);
  }
  return [tokens, spans];
}

// The bytes first, under the token; then the script that counts and keeps them.
async function submit(gid, task, token, group, spans, scores) {
  const data = Buffer.from(encode(group, { useBigInt64: true }));
  const made = new Set(spans.map(([, , , version, lineage]) => `oldest ${lineage} ${version}`));
  const keyOf = (n) => `payload:${gid}:${token}${n ? `:${n}` : ""}`;
  const keys = Array.from({ length: Math.ceil(data.length / CHUNK) }, (_, n) => keyOf(n));
  const unit = { gid, token, status: "completed", samples: scores.length, chunks: keys.length, made_by: [...made].join() };
  const tokens = spans.reduce((sum, span) => sum + span[2], 0);
  Object.assign(unit, { tokens, length: tokens, size: data.length });
  Object.assign(unit, { crc: crc32(data).toString(16).padStart(8, "0"), reward_count: scores.length });
  unit.reward_sum = scores.reduce((sum, score) => sum + score, 0);
  let answer = ["MISSING"];
  while (answer[0] === "MISSING") {
    for (const [n, key] of keys.entries())
      await redis.set(prefix + key, data.subarray(n * CHUNK, (n + 1) * CHUNK), "EX", 3600);
    answer = await call("submit", { task, keys, unit });
  }
  done += answer[0] === "OK" ? 1 : 0; // FENCED: somebody else has the group, this result is not wanted
  facts.report = `done=${done} concurrency=1`;
}

process.on("SIGTERM", () => { stopping = true; });
for (const [field, value] of Object.entries(await redis.hgetall(`${prefix}meta`)))
  if (field !== "nonce" && field !== "limits_op") facts[field] = JSON.parse(value);
hear((await call("register")).slice(2));
while (!stopping && mode !== "finish") {
  await tick();
  if (!lanes || !(await work())) await sleep(50); // or BLPOP bell:workers
}
await tick();
await call("deregister");
redis.disconnect();
