// Requests to `rolloutmq web`. The token comes with the address (#token=…) or from the login form,
// and is kept for this tab only.

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
  const answer = await fetch(`/api/${path}`, { method, headers: headers() });
  const document = await answer.json();
  if (!answer.ok) throw new Refused(answer.status, document);
  return document;
}

// Server-sent events by fetch, because an EventSource cannot send the token. Reconnects until
// `signal` is aborted.
export async function follow(query, signal, onEvent, onTrouble) {
  while (!signal.aborted) {
    try {
      const answer = await fetch(`/api/stream?${query}`, { headers: headers(), signal });
      if (!answer.ok) throw new Refused(answer.status, await answer.json());
      await read(answer.body, signal, onEvent);
      if (!signal.aborted) onTrouble(new Error("`rolloutmq web` was stopped"));
    } catch (error) {
      if (signal.aborted) return;
      onTrouble(error);
      if (error.status === 401) return;
    }
    await new Promise((resume) => setTimeout(resume, 2000));
  }
}

async function read(body, signal, onEvent) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
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
