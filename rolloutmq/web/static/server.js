// What the page asks of `rolloutmq web`. The token came behind the # of the address and stays in this tab.

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
  const told = await answer.json();
  if (!answer.ok) throw new Error(told.hint ? `${told.error} (${told.hint})` : told.error);
  return told;
}

// Server-sent events by fetch: an EventSource cannot carry the token. Begins again for ever.
export async function follow(onLook, onTrouble) {
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
        for (const event of events) onLook(JSON.parse(event.slice("data: ".length)));
      }
      onTrouble("rolloutmq web has ended");
    } catch (error) {
      onTrouble(`no connection to rolloutmq web: ${error.message}`);
    }
    await new Promise((resume) => setTimeout(resume, 2000));
  }
}
