// Requests to `rolloutmq web`. The token is the fragment of the address, and is kept for this tab only.

const found = /token=([^&]+)/.exec(location.hash);
if (found) {
  sessionStorage.setItem("token", decodeURIComponent(found[1]));
  history.replaceState(null, "", "#/run");
}

export const hasToken = () => Boolean(sessionStorage.getItem("token"));

function headers() {
  return hasToken() ? { Authorization: `Bearer ${sessionStorage.getItem("token")}` } : {};
}

export async function ask(path, method = "GET") {
  const answer = await fetch(`/api/${path}`, { method, headers: headers() });
  const document = await answer.json();
  if (!answer.ok) throw new Error(document.hint ? `${document.error} (${document.hint})` : document.error);
  return document;
}

// Server-sent events by fetch, because an EventSource cannot send the token. Reconnects until the page is closed.
export async function follow(onSnapshot, onTrouble) {
  for (;;) {
    try {
      const answer = await fetch("/api/stream", { headers: headers() });
      if (!answer.ok) throw new Error((await answer.json()).error);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        rest += value;
        const events = rest.split("\n\n");
        rest = events.pop();
        for (const event of events) onSnapshot(JSON.parse(event.slice("data: ".length)));
      }
      onTrouble("`rolloutmq web` was stopped");
    } catch (error) {
      onTrouble(`no connection to rolloutmq web: ${error.message}`);
    }
    await new Promise((resume) => setTimeout(resume, 2000));
  }
}
