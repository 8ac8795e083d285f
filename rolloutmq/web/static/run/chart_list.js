// Which charts there are. A chart by train step names metrics of steps.jsonl; one by time names
// numbers of the live record (rolloutmq/web/watcher.py).

const STAGES = ["waiting", "running", "completed", "aborted", "expired", "taken"];
const SHARES = ["failed", "truncated", "expired", "unparsed", "filtered_groups"];
const PARTS = ["wait", "read", "pause", "train", "publish"];

const line = (name, label, options = {}) => ({ name, label, ...options });
const spread = (prefix, label) => line(`${prefix}/mean`, label, {
  band: [`${prefix}/std`, `${prefix}/min`, `${prefix}/max`], note: "± one standard deviation",
});
const named = (columns, prefix) => Object.keys(columns).filter((name) => name.startsWith(prefix)).sort()
  .map((name) => line(name, name.slice(prefix.length)));

const withFailed = (task, columns) => {
  const failed = columns[`eval/failed/${task}`]?.at(-1);
  return failed ? `${task} (${failed} failed)` : task;
};

const IS_COST = /^cost\/(total|step|million_trained|next_100_steps)$/;
// Metrics that are shares: their axis is from 0 to 1.
const IS_SHARE = /fraction|share|accuracy|solved|\/ess$|^eval\/(accuracy|score)/;

// {key, title, unit, lines: array or function of the columns, stacked, table: "evaluations"}
export const BY_STEP = [
  { key: "reward", title: "Reward", unit: "score of the batch", lines: [spread("rewards", "mean")] },
  { key: "solved", title: "Solved", unit: "share of groups with a full score (1 or more)", isShare: true, lines: [line("rewards/solved", "solved")] },
  { key: "evaluation", title: "Evaluations", unit: "accuracy on held-out tasks", table: "evaluations", isShare: true,
    lines: (columns) => named(columns, "eval/accuracy/").map(({ name, label }) => line(name, withFailed(label, columns))) },
  { key: "task-reward", title: "Reward by task", unit: "mean score", lines: (columns) => named(columns, "rewards/mean/") },
  { key: "loss", title: "Loss", unit: "policy loss", lines: [line("loss/policy", "policy")] },
  { key: "kl", title: "KL divergence", unit: "nats per token", lines: [
    line("policy/kl_ref", "to the reference"), line("distill/reverse_kl", "to the teachers"), line("policy/kl_old", "to the old policy"), line("mismatch/kl", "trainer to engine")] },
  { key: "entropy", title: "Entropy", unit: "nats per token", lines: [line("policy/entropy", "entropy")] },
  { key: "gradient", title: "Gradient norm", unit: "before clipping", lines: [line("optim/grad_norm", "norm")] },
  { key: "length", title: "Response length", unit: "tokens", lines: [spread("response_len", "mean")] },
  { key: "rewards", title: "Rewards by step", unit: "of single rollouts", isHeat: true, lines: [line("rewards", "rewards")] },
  { key: "lengths", title: "Lengths by step", unit: "tokens of single responses", isHeat: true, lines: [line("response_len", "lengths")] },
  { key: "staleness", title: "Staleness", unit: "train steps", lines: [line("staleness/mean", "mean"), line("staleness/max", "max")] },
  { key: "parts", title: "Seconds of a step", unit: "seconds, by part", stacked: true,
    lines: [...PARTS.map((part) => line(`time/${part}_s`, part)), line("", "other", { rest: "time/step_s" })] },
  { key: "throughput", title: "Throughput", unit: "tokens per second and GPU", lines: [
    line("throughput/rollout_tgs", "rollouts"), line("throughput/training_tgs", "training alone"), line("throughput/effective_tgs", "whole step")] },
  { key: "shares", title: "Lost and cut", unit: "share since the step before", percent: true,
    lines: (columns) => SHARES.flatMap((share) => named(columns, `${share}/`).filter(({ name }) => columns[name].some(Boolean)).map(({ name, label }) => line(name, `${share.replace("_", " ")} ${label}`))) },
  { key: "token-rows", title: "Where the tokens went", unit: "tokens sampled so far", stacked: true, lines: (columns) => named(columns, "tokens/") },
  { key: "pools", title: "Groups left in the pools", unit: "groups after a step", lines: [
    line("async/completed_groups", "completed"), line("async/aborted_groups", "aborted"), line("async/expired_groups", "expired")] },
];

export const BY_TIME = [
  { key: "stages", title: "Groups by stage", unit: "groups", stacked: true, perTask: true,
    lines: (columns, task) => STAGES.map((stage) => line("", stage, { sum: named(columns, "groups/").map(({ name }) => name)
      .filter((name) => name.endsWith(`/${stage}`) && (!task || name === `groups/${task}/${stage}`)) })) },
  { key: "tokens", title: "Tokens per second", unit: "all workers", lines: [line("tokens_per_s", "all workers")] },
  { key: "worker-tokens", title: "Tokens per second by worker", unit: "tokens/s", lines: (columns) => named(columns, "worker_tokens_per_s/") },
];

// Charts of all metrics that no chart above shows; evaluations by task.
export function otherCharts(columns, evaluations) {
  const shown = new Set(BY_STEP.flatMap(({ lines }) => (Array.isArray(lines) ? lines : []))
    .flatMap(({ name, band = [], rest }) => [name, rest, ...band]));
  const kept = Object.keys(columns).filter((name) => !shown.has(name) && !/^rewards\/mean\/|^tokens\/|^pause\/le_|^cost\/in\//.test(name) && !SHARES.some((share) => name.startsWith(`${share}/`)));
  const measured = [...new Set(Object.keys(evaluations).map((name) => name.slice(0, name.lastIndexOf("/") + 1)))].filter((name) => name !== "eval/accuracy/");
  const currency = named(columns, "cost/in/")[0]?.label ?? "";
  return [...kept.sort().map((name) => ({ key: name, title: name, unit: IS_COST.test(name) ? currency : "", isShare: IS_SHARE.test(name), isBytes: name.endsWith("_bytes"), lines: [line(name, name.split("/").at(-1))] })),
    ...measured.sort().map((prefix) => ({ key: prefix, title: prefix.slice(0, -1), unit: "by task", table: "evaluations", isShare: IS_SHARE.test(prefix), lines: (all) => named(all, prefix) }))];
}

// The values of a line in the columns of a table; null where the table lacks it.
export function valuesOf(chart, wanted, columns) {
  if (wanted.rest) {
    const parts = chart.lines.filter(({ name }) => name).map(({ name }) => columns[name]).filter(Boolean);
    return columns[wanted.rest]?.map((whole, row) =>
      (whole === null ? null : Math.max(0, whole - parts.reduce((sum, part) => sum + (part[row] ?? 0), 0)))) ?? null;
  }
  if (wanted.sum) {
    const parts = wanted.sum.map((name) => columns[name]);
    return parts.length ? parts[0].map((_, row) => parts.reduce((sum, part) => sum + (part[row] ?? 0), 0)) : null;
  }
  return columns[wanted.name] ?? null;
}

export function linesOf(chart, columns, task) {
  return typeof chart.lines === "function" ? chart.lines(columns, task) : chart.lines;
}
