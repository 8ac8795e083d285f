// Requests to `rolloutmq web`. The token comes with the address (#token=…) or from the login form,
// and is kept for this tab only. In a report, the answers are in the page. Where the run's server is
// lost, `rolloutmq web` answers from the run's folder, and sends the contents of its report.

const inside = document.getElementById("saved");
export let saved = inside && JSON.parse(inside.textContent);
export const isServed = !inside;

const found = /token=([^&]+)/.exec(location.hash);
if (found) {
  keepToken(decodeURIComponent(found[1]));
  history.replaceState(null, "", "#/run");
}

export function keepToken(token) {
  sessionStorage.setItem("token", token);
}

function headers() {
  const token = sessionStorage.getItem("token");
  return token ? { Authorization: `Bearer ${token}` } : {};
}

export class Refused extends Error {
  constructor(status, document) {
    super(document.hint ? `${document.error} (${document.hint})` : document.error);
    this.status = status;
  }
}

export async function ask(path, method = "GET") {
  if (inside || (saved && /^(dead|panels)/.test(path))) return fromReport(path);
  const answer = await fetch(`/api/${path}`, { method, headers: headers() });
  const document = await answer.json();
  if (!answer.ok) throw new Refused(answer.status, document);
  if (document.saved) saved = document.saved;
  return document;
}

function fromReport(path) {
  const [name, query] = path.split("?");
  const { steps, samples } = saved;
  if (name === "dead") return saved.dead;
  if (name.startsWith("panels/")) return saved.panels[name.slice("panels/".length)] ?? null;
  if (name === "runs") return { own: saved.run, runs: [saved.run] };
  const asked = new URLSearchParams(query), text = asked.get("text") || "", why = asked.get("why") || "";
  if (name === "samples") {
    const isWanted = (sample) => (!why || sample.why === why) && JSON.stringify(sample).toLowerCase().includes(text.toLowerCase());
    if (text || why) return { steps, step: null, groups: samples.filter(isWanted).reverse() };
    const step = Number(asked.get("step")) || null;
    return { steps, step, groups: step ? samples.filter((sample) => sample.step === step) : samples };
  }
  const gid = decodeURIComponent(name.replace("groups/", "")), step = asked.get("step");
  const sample = samples.findLast((each) => each.gid === gid && (!step || each.step === Number(step)));
  if (!sample) throw new Error(`this report has no sample of ${gid}`);
  return { ...sample, places: [], may: [], gone: "", sampled: { step: sample.step, why: sample.why } };
}

// Server-sent events by fetch, because an EventSource cannot send the token. Reconnects until
// `signal` is aborted.
export async function follow(query, signal, onEvent, onTrouble) {
  if (saved) return onEvent({ trouble: saved.about.facts["not read"], may_act: false, live: { x: [], columns: {} }, series: { [saved.run]: saved.series } });
  while (!signal.aborted) {
    try {
      await listen(`stream?${query}`, signal, onEvent);
      if (!signal.aborted) onTrouble(new Error("`rolloutmq web` was stopped"));
    } catch (error) {
      if (signal.aborted) return;
      onTrouble(error);
      if (error.status === 401) return;
    }
    await new Promise((resume) => setTimeout(resume, 2000));
  }
}

// Server-sent events of one request, until it ends or `signal` is aborted.
export async function listen(path, signal, onEvent) {
  const answer = await fetch(`/api/${path}`, { headers: headers(), signal });
  if (!answer.ok) throw new Refused(answer.status, await answer.json());
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done || signal.aborted) return;
    rest += value;
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) onEvent(JSON.parse(event.slice("data: ".length)));
  }
}
