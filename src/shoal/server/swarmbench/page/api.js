// Calls to the server: JSON, errors with their message, and event streams that carry the API key.

const KEY = "shoal-key"; // for this tab only: a key does not belong on the disk

export class ApiError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** The server did not answer at all. */
export class Unreachable extends Error {}

let askForKey = async () => null;
let asking = null;

/** What to call when the server wants a key; it resolves to one, or to null. */
export function onKeyWanted(ask) {
  askForKey = ask;
}

function headers(more) {
  const key = sessionStorage.getItem(KEY);
  return { ...(key ? { Authorization: `Bearer ${key}` } : {}), ...more };
}

async function send(path, options) {
  for (;;) {
    let answer;
    try {
      answer = await fetch(path, { ...options, headers: headers(options.headers) });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Unreachable(error.message);
    }
    if (answer.status !== 401) return answer;
    asking ??= askForKey().finally(() => (asking = null));
    const key = await asking;
    if (!key) return answer;
    sessionStorage.setItem(KEY, key);
  }
}

async function failure(answer) {
  try {
    const { error } = await answer.json();
    return new ApiError(answer.status, error.message, error.code);
  } catch {
    return new ApiError(answer.status, `the server answered with status ${answer.status}`, "unknown");
  }
}

/** Call an endpoint; gives the JSON of its answer (or the text), throws ApiError or Unreachable. */
export async function call(method, path, body) {
  const options = { method, headers: {} };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers["Content-Type"] = "application/json";
  }
  const answer = await send(path, options);
  if (!answer.ok) throw await failure(answer);
  return answer.headers.get("content-type").startsWith("application/json") ? answer.json() : answer.text();
}

/**
 * Read server-sent events until the stream ends. `take(name, data, id)` gets each one, the data parsed.
 * EventSource could not send the key, nor tell a missing run from a missing server.
 */
export async function stream(path, signal, take) {
  const answer = await send(path, { method: "GET", signal });
  if (!answer.ok) throw await failure(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      held += value;
      const events = held.split("\n\n");
      held = events.pop();
      for (const event of events) dispatch(event, take);
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable(error.message);
  }
}

function dispatch(event, take) {
  let name = "message";
  let data = "";
  let id = null;
  for (const line of event.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    else if (line.startsWith("data: ")) data += line.slice(6);
    else if (line.startsWith("id: ")) id = Number(line.slice(4));
  }
  if (data) take(name, JSON.parse(data), id);
}
