// The history: threads are searched, opened at their latest turn, renamed, deleted, exported.

import { call } from "./api.js";
import { $, ask, make } from "./dom.js";
import { choose, prefs } from "./prefs.js";
import { threadLine } from "./run.js";

const PAGE = 50;
let current = null;
let open = () => {};
let failed = () => {};
let asked = 0;

/** `openRun(id)` shows a run, `gone(thread)` is told of one that was deleted, `complain` gets errors. */
export function setUpHistory({ openRun, gone, complain }) {
  open = openRun;
  failed = complain;
  $("history-toggle").onclick = () => toggle($("history").hidden);
  $("history").addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation(); // elsewhere it stops the run
    toggle(false);
  });
  let timer = null;
  $("search").oninput = () => {
    clearTimeout(timer);
    timer = setTimeout(() => refreshHistory(), 150);
  };
  $("runs").addEventListener("click", (event) => {
    const act = event.target.closest("[data-act]");
    if (act) perform(act.dataset.act, act.closest("li").dataset, gone).catch(failed);
  });
  if (prefs.historyOpen && window.innerWidth > 900) toggle(true);
}

function toggle(shown) {
  $("history").hidden = !shown;
  $("history-toggle").setAttribute("aria-expanded", String(shown));
  choose({ historyOpen: shown });
  if (shown) {
    refreshHistory();
    $("search").focus();
  } else {
    $("history-toggle").focus();
  }
}

/** Mark which thread is on the screen. */
export function markCurrent(id) {
  current = id;
  for (const item of $("runs").children) item.classList.toggle("current", item.dataset.id === id);
}

/** Read the list again, when it is on the screen. */
export async function refreshHistory() {
  if ($("history").hidden) return;
  const mine = ++asked;
  try {
    const query = encodeURIComponent($("search").value.trim());
    const { data } = await call("GET", `/swarmbench/threads?q=${query}&limit=${PAGE}`);
    if (mine !== asked) return; // a later search was faster
    $("runs").replaceChildren(...data.map(item));
    $("runs-none").hidden = data.length > 0;
    markCurrent(current);
  } catch (error) {
    failed(error);
  }
}

function item(thread) {
  const act = (name, label, title) =>
    make("button", { type: "button", className: "text", dataset: { act: name }, attributes: { "aria-label": `${title} ${thread.title}` } }, label);
  return make(
    "li",
    { dataset: { id: thread.id, first: thread.first, last: thread.last, title: thread.title } },
    make("button", { type: "button", className: "open", dataset: { act: "open" } }, make("span", { className: "title" }, thread.title), threadLine(thread)),
    make(
      "div",
      { className: "acts" },
      act("rename", "Rename", "Rename"),
      act("json", "JSON", "Export as JSON"),
      act("markdown", "Markdown", "Export as Markdown"),
      act("delete", "Delete", "Delete"),
    ),
  );
}

async function perform(act, { id, first, last, title }, gone) {
  if (act === "open") {
    if (window.innerWidth <= 900) toggle(false);
    await open(last);
  } else if (act === "rename") {
    const buttons = [{ label: "Cancel", value: null }, { label: "Rename", value: true, kind: "primary" }];
    const fresh = await ask({ title: "Rename", buttons, field: { label: "Title", value: title } });
    if (fresh) await call("PATCH", `/swarmbench/runs/${first}`, { title: fresh });
    await refreshHistory();
  } else if (act === "delete") {
    const buttons = [{ label: "Keep", value: null }, { label: "Delete", value: true, kind: "danger" }];
    if (!(await ask({ title: "Delete this thread?", text: title, buttons }))) return;
    await call("DELETE", `/swarmbench/threads/${id}`);
    gone(id);
    await refreshHistory();
  } else {
    const told = await call("GET", `/swarmbench/runs/${last}?form=${act}`);
    const text = act === "json" ? JSON.stringify(told, null, 2) : told;
    save(text, `${title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60)}.${act === "json" ? "json" : "md"}`);
  }
}

function save(text, name) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
