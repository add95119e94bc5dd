// The page: ties its parts together and keeps in touch with the server.

import { ApiError, Unreachable, call, onKeyWanted } from "./api.js";
import { chosen, clearQuestion, setUpComposer } from "./composer.js";
import { $, announce, ask, closable, make, say } from "./dom.js";
import { graph, graphOrder, setUpGraph } from "./graph.js";
import { markCurrent, refreshHistory, setUpHistory } from "./history.js";
import { setUpModels, showState } from "./models.js";
import { prefs } from "./prefs.js";
import { RunView } from "./run.js";
import { applyTheme, setUpSettings, showEngine } from "./settings.js";
import { showThread } from "./turns.js";

const POLL_MS = 2500;
const RETRY_MS = [250, 500, 1000, 2000, 3000];
const EXAMPLES = [
  "Should our town build a swimming pool?",
  "How do I start running at forty?",
  "Is it worth learning to bake bread?",
  "Should a small shop sell online?",
];

const view = new RunView({ changed: runChanged, lost: connectionLost });
let instance = null; // of the server: another one means that it was restarted
let retries = 0;
let timer = null;
let polling = null;
let loading = false;
let sending = false;
let cutOff = null; // the run that was on the screen when the server went away

function banner(text, kind = "info") {
  $("banner").hidden = !text;
  $("banner").dataset.kind = kind;
  say($("banner-text"), text);
}

function complain(error) {
  if (error instanceof Unreachable) connectionLost();
  else banner(error.message, "bad");
}

function connection(state, text) {
  if (loading && state !== "lost") return;
  $("connection").dataset.state = state;
  say($("connection-text"), text);
}

/** Ask the server how it is, one question at a time; gives its answer, or undefined. */
function poll() {
  polling ??= askServer().finally(() => (polling = null));
  return polling;
}

/** After a silence, come back to what was on the screen. */
async function askServer() {
  clearTimeout(timer);
  let page;
  try {
    page = await call("GET", "/swarmbench/state");
  } catch (error) {
    if (!(error instanceof Unreachable)) complain(error);
    connection("lost", "no connection, trying again");
    timer = setTimeout(poll, RETRY_MS[Math.min(retries++, RETRY_MS.length - 1)]);
    return;
  }
  const wasLost = retries > 0;
  const restarted = instance !== null && page.instance !== instance;
  retries = 0;
  instance = page.instance;
  showEngine(page);
  showState(page);
  connection(page.healthy ? "ok" : "waiting", page.healthy ? "connected" : page.status);
  const paced = page.power?.summary ?? "";
  $("power").hidden = !paced;
  say($("power"), paced);
  if (page.history_error) banner(`Runs are not being saved: ${page.history_error}`, "bad");
  if (restarted) afterRestart().catch(complain);
  else if (wasLost) view.resume().catch(complain);
  timer = setTimeout(poll, document.hidden ? 4 * POLL_MS : POLL_MS);
  return page;
}

function connectionLost() {
  connection("lost", "connection lost, trying again");
  retries = Math.max(retries, 1);
  clearTimeout(timer);
  timer = setTimeout(poll, RETRY_MS[0]);
}

async function afterRestart() {
  const run = view.document;
  banner("The server was restarted.");
  announce("Connected again: the server was restarted");
  await refreshHistory();
  if (run?.state !== "running") return;
  cutOff = run.id;
  try {
    await view.open(run.id);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    run.state = "failed"; // nothing of it had been saved: keep what was seen
    view.show(run);
  }
}

function runChanged(run, again) {
  if (cutOff === run.id) {
    cutOff = null;
    const what = view.running ? "goes on" : "was cut off; what had been saved is shown";
    banner(`The server was restarted. The run ${what}.`);
  }
  showButtons();
  showThread(true);
  $("welcome").hidden = true;
  document.title = `${run.title} · SwarmBench`;
  if (!again || !view.running) refreshHistory();
  markCurrent(run.thread);
}

/** A turn ends before the next one begins; who cannot wait begins a new thread. */
function showButtons() {
  $("stop").hidden = !view.running;
  $("send").disabled = loading || view.running;
}

/** What the message box stands for: who answers, and what beside it does not matter then. */
function showAsked() {
  const asked = graph();
  for (const id of ["count-field", "team-open", "one-by-one-chip"]) $(id).hidden = asked !== null;
  say($("graph-open"), asked ? `Graph: ${asked.name}` : "Graph…");
}

function swarmOrder(question) {
  return {
    question,
    agents: chosen(),
    max_tokens: prefs.maxTokens,
    temperature: prefs.temperature,
    synthesis: prefs.synthesis,
    one_by_one: prefs.oneByOne,
  };
}

async function send() {
  const question = $("question").value.trim();
  const asked = graph();
  const wanted = !asked || asked.inputs.length > 0; // a graph may need no words
  if ((wanted && !question) || sending || $("send").disabled) {
    $("question").focus();
    return;
  }
  const body = { ...(asked ? graphOrder(question) : swarmOrder(question)), sharing: prefs.sharing };
  if (view.document) body.after = view.document.id;
  if (prefs.seed !== "") body.seed = prefs.seed;
  sending = true;
  try {
    const { id } = await call("POST", asked ? "/swarmbench/graphs/runs" : "/swarmbench/runs", body);
    clearQuestion();
    banner("");
    announce(asked ? `The graph ${asked.name} has begun` : `${body.agents.length} agents have begun`);
    location.hash = id;
  } catch (error) {
    complain(error);
  } finally {
    sending = false;
  }
}

/** The address says which run is on the screen, so that a reload comes back to it. */
async function followAddress() {
  const id = location.hash.slice(1);
  if (!id) {
    view.leave();
    $("welcome").hidden = false;
    document.title = "SwarmBench · shoal";
    markCurrent(null);
    showButtons();
    showThread(false);
    return;
  }
  try {
    window.scrollTo(0, 0);
    await view.open(id);
  } catch (error) {
    if (error instanceof ApiError && error.status === 404) history.replaceState(null, "", "#");
    complain(error);
    if (!location.hash) await followAddress();
  }
}

function setUp(page) {
  setUpComposer(page.specialists, send, () => view.stop().catch(complain));
  setUpGraph(page.max_graph, showAsked);
  setUpModels({
    busy(on) {
      loading = on;
      showButtons();
      if (!on) poll();
    },
    failed: complain,
  });
  setUpHistory({
    openRun(id) {
      if (location.hash.slice(1) === id) return followAddress();
      location.hash = id;
    },
    gone(thread) {
      if (view.document?.thread === thread) location.hash = "";
    },
    complain,
  });
  setUpSettings({ themeChanged: () => view.strip.restart(), complain });
  for (const name of ["team", "graph", "settings", "sides"]) closable($(name));
  $("banner-close").onclick = () => banner("");
  $("fresh").onclick = () => {
    location.hash = "";
    $("question").focus();
  };
  $("examples").replaceChildren(
    ...EXAMPLES.map((text) => {
      const use = () => {
        $("question").value = text;
        send();
      };
      return make("li", {}, make("button", { type: "button", className: "chip", onclick: use }, text));
    }),
  );
  document.addEventListener("keydown", (event) => {
    const open = document.querySelector("dialog[open]");
    if (event.key === "Escape" && !open && view.running) view.stop().catch(complain);
    if (event.key === "/" && !open && !/input|textarea|select/i.test(event.target.tagName)) {
      event.preventDefault();
      $("question").focus();
    }
  });
  document.addEventListener("visibilitychange", () => !document.hidden && poll());
  window.addEventListener("hashchange", followAddress);
}

onKeyWanted(() =>
  ask({
    title: "API key",
    text: "This server wants a key. It is kept for this tab only.",
    buttons: [{ label: "Use it", value: true, kind: "primary" }],
    field: { label: "Key", type: "password" },
  }),
);

applyTheme();
let page;
while (!(page = await poll())) await new Promise((resolve) => setTimeout(resolve, 500));
setUp(page);
$("question").focus();
await followAddress();
