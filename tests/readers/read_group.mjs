// A group of rolloutmq, read without Python and without a library: the wire format is msgpack, its columns raw arrays.
// node read_group.mjs FILE prints gid, tokens, text and reward of every rollout as JSON.
import { readFileSync } from "node:fs";

const bytes = readFileSync(process.argv[2]);
const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
let at = 0;

function take(size) {
  if (at + size > bytes.length) throw new Error(`cut off at ${at}`);
  at += size;
  return at - size;
}

const uint = (size) => (size === 8 ? Number(view.getBigUint64(take(8))) : bytes.readUIntBE(take(size), size));
const int = (size) => (size === 8 ? Number(view.getBigInt64(take(8))) : bytes.readIntBE(take(size), size));
const text = (size) => bytes.toString("utf8", take(size), at);
const bin = (size) => bytes.subarray(take(size), at);
const list = (size) => Array.from({ length: size }, value);
const map = (size) => Object.fromEntries(Array.from({ length: size }, () => [value(), value()]));

function value() {
  const type = uint(1);
  if (type < 0x80) return type;
  if (type < 0x90) return map(type & 0x0f);
  if (type < 0xa0) return list(type & 0x0f);
  if (type < 0xc0) return text(type & 0x1f);
  if (type >= 0xe0) return type - 256;
  switch (type) {
    case 0xc0: return null;
    case 0xc2: return false;
    case 0xc3: return true;
    case 0xc4: case 0xc5: case 0xc6: return bin(uint(1 << (type - 0xc4)));
    case 0xca: return view.getFloat32(take(4));
    case 0xcb: return view.getFloat64(take(8));
    case 0xcc: case 0xcd: case 0xce: case 0xcf: return uint(1 << (type - 0xcc));
    case 0xd0: case 0xd1: case 0xd2: case 0xd3: return int(1 << (type - 0xd0));
    case 0xd9: case 0xda: case 0xdb: return text(uint(1 << (type - 0xd9)));
    case 0xdc: case 0xdd: return list(uint(2 << (type - 0xdc)));
    case 0xde: case 0xdf: return map(uint(2 << (type - 0xde)));
  }
  throw new Error(`type 0x${type.toString(16)} at ${at - 1}`);
}

const group = value();
if (group.schema !== 3) throw new Error(`schema ${group.schema}`);

// columns are little-endian, at multiples of eight bytes of `data`, which may start anywhere: a copy is aligned
function column(name, type) {
  const [offset, ...shape] = group.columns[name] ?? [0, 0];
  const start = group.data.byteOffset + offset;
  const size = shape.reduce((a, b) => a * b, type.BYTES_PER_ELEMENT);
  return Array.from(new type(group.data.buffer.slice(start, start + size)));
}

const STATUSES = ["init", "completed", "aborted", "expired", "failed", "filtered", "archived"];
const names = group.rewards ?? [];
const [indices, statuses, scores] = [column("indices", Int32Array), column("statuses", Uint8Array), column("rewards", Float64Array)];
const ids = column("response_ids", Int32Array);
const logprobs = column("logprobs", Float32Array);
let start = 0;
const rollouts = column("lengths", Int32Array).map((length, n) => {
  const end = (start += length);
  const given = names.map((name, k) => [name, scores[n * names.length + k]]).filter(([, score]) => !Number.isNaN(score));
  return {
    index: indices[n],
    status: STATUSES[statuses[n]],
    response: group.responses[n],
    reward: given.length ? Object.fromEntries(given) : null,
    tokens: ids.slice(end - length, end),
    logprob: logprobs.slice(end - length, end).reduce((a, b) => a + b, 0),
  };
});
console.log(JSON.stringify({ gid: group.gid, task: group.task, prompt: column("prompt_ids", Int32Array), rollouts }));
