// Settings: how agents answer, the engine's stall bound, looks, and the model store.

import { call } from "./api.js";
import { compareWith } from "./sides.js";
import { $, ask, bytes, make, say } from "./dom.js";
import { refreshModels } from "./models.js";
import { choose, prefs } from "./prefs.js";

const PULL_MS = 500;
const PRECISIONS = ["q8_0", "q4_1", "q4_0"];
let complainLater = () => {};
let page = null;
let polling = null;

/** What `/swarmbench/state` said last. */
export function showEngine(told) {
  page = told;
}

export function applyTheme() {
  const root = document.documentElement;
  if (prefs.theme === "auto") delete root.dataset.theme;
  else root.dataset.theme = prefs.theme;
}

/** `themeChanged` is called when colours differ, `complain` with errors. */
export function setUpSettings({ themeChanged, complain }) {
  complainLater = complain;
  $("settings-open").onclick = () => {
    build(themeChanged, complain);
    $("settings").showModal();
    refreshStorage().catch(complain);
  };
  $("settings").addEventListener("close", () => {
    clearTimeout(polling);
    polling = null;
  });
  $("theme").onclick = () => {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const now = prefs.theme === "auto" ? (dark ? "dark" : "light") : prefs.theme;
    choose({ theme: now === "dark" ? "light" : "dark" });
    applyTheme();
    themeChanged();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themeChanged);
}

function number(label, note, value, limits, changed) {
  const input = make("input", { type: "number", value, ...limits });
  input.onchange = () => {
    if (input.validity.valid && (input.value !== "" || !limits.required)) changed(input.value === "" ? "" : Number(input.value));
    else input.value = value;
  };
  return field(label, note, input);
}

function toggle(label, note, checked, changed) {
  const input = make("input", { type: "checkbox", checked, attributes: { role: "switch" } });
  input.onchange = () => changed(input.checked);
  return field(label, note, make("span", { className: "switch" }, input, make("span", { className: "track" })));
}

function field(label, note, control) {
  const text = make("span", {}, make("span", { className: "label" }, label), make("span", { className: "quiet" }, note));
  return make("label", { className: "field" }, text, control);
}

function build(themeChanged, complain) {
  const theme = make("select", {}, ...["auto", "light", "dark"].map((name) => new Option(name, name, false, prefs.theme === name)));
  theme.onchange = () => {
    choose({ theme: theme.value });
    applyTheme();
    themeChanged();
  };
  const engine = page?.engine;
  const stall = async (ms) => call("POST", "/swarmbench/state", { max_stall_ms: ms }).then((told) => (page = told), complain);
  $("settings-body").replaceChildren(
    make("h3", {}, "Answers"),
    number("Max tokens", "of each agent", prefs.maxTokens, { min: 1, max: 4096, required: true }, (maxTokens) => choose({ maxTokens })),
    number("Temperature", "0 always takes the likeliest token", prefs.temperature, { min: 0, max: 2, step: 0.1, required: true }, (temperature) => choose({ temperature })),
    number("Seed", "empty: another one each time", prefs.seed, { min: 0, max: 2 ** 31 }, (seed) => choose({ seed })),
    toggle("Synthesis", "one more agent joins what the others wrote", prefs.synthesis, (synthesis) => choose({ synthesis })),
    make("h3", {}, "Engine"),
    toggle("Prefix sharing", "off: each agent computes and holds the whole prompt", prefs.sharing, (sharing) => choose({ sharing })),
    number("Stall bound, ms", "the longest a stream waits while a prompt joins; for every caller, from now on", engine?.max_stall_ms ?? "", { min: 1, max: 60000, required: true }, stall),
    make("h3", {}, "Looks"),
    field("Theme", "auto follows the system", theme),
    make("h3", {}, "Models on disk"),
    make("ul", { id: "storage", className: "storage" }),
    make("p", { id: "storage-free", className: "quiet" }),
    pullForm(complain),
  );
}

function pullForm(complain) {
  const input = make("input", { placeholder: "smollm2-135m, or org/name:file.gguf", maxLength: 300, attributes: { "aria-label": "Model to fetch" } });
  const start = async () => {
    if (!input.value.trim()) return;
    await call("POST", "/swarmbench/storage", { name: input.value.trim() });
    input.value = "";
    await refreshStorage();
  };
  const tell = (error) => {
    $("settings").close();
    complain(error);
  };
  input.onkeydown = (event) => event.key === "Enter" && start().catch(tell);
  const button = make("button", { type: "button", className: "button", onclick: () => start().catch(tell) }, "Fetch");
  return make("div", { className: "pull" }, input, button);
}

async function refreshStorage() {
  const storage = await refreshModels();
  if (!$("settings").open) return;
  $("storage").replaceChildren(...storage.models.map(stored), ...storage.pulls.filter((pull) => !["done", "cancelled"].includes(pull.stage)).map(pulling));
  const { runs, bytes: size } = storage.history;
  say($("storage-free"), `${bytes(storage.free_bytes)} free. History: ${runs} runs${size ? `, ${bytes(size)}` : ""}.`);
  clearTimeout(polling);
  if (storage.pulls.some((pull) => !pull.finished)) polling = setTimeout(() => refreshStorage().catch(() => {}), PULL_MS);
}

function stored(model) {
  const sizes = `${model.weights ?? model.kind} · ${bytes(model.bytes)}${model.derived_bytes ? ` + ${bytes(model.derived_bytes)} derived` : ""}`;
  const remove = make("button", { type: "button", className: "text", disabled: model.loaded, attributes: { "aria-label": `Delete ${model.name}` } }, model.loaded ? "loaded" : "Delete");
  remove.onclick = async () => {
    const buttons = [{ label: "Keep", value: null }, { label: "Delete", value: true, kind: "danger" }];
    if (!(await ask({ title: `Delete ${model.name}?`, text: `${bytes(model.bytes + model.derived_bytes)} are freed.`, buttons }))) return;
    await call("DELETE", `/swarmbench/storage/${encodeURIComponent(model.name)}`).catch((error) => say($("storage-free"), error.message));
    await refreshStorage();
  };
  const buttons = make("span", { className: "storage-buttons" }, ...(model.weights ? [precisions(model)] : []));
  if (!model.loaded) buttons.append(make("button", { type: "button", className: "text", onclick: () => sideBySide(model.name) }, "Compare"));
  buttons.append(remove);
  return make("li", {}, make("span", {}, make("b", {}, model.name), make("span", { className: "quiet" }, sizes)), buttons);
}

/** Make the model at another precision; it appears below with its progress, and in the selector when it is there. */
function precisions(model) {
  const select = make("select", { attributes: { "aria-label": `Make ${model.name} at another precision` } }, new Option("Make…", ""), ...PRECISIONS.map((name) => new Option(name, name)));
  select.onchange = async () => {
    const body = { name: model.name, precision: select.value };
    await call("POST", "/swarmbench/storage", body).catch((error) => say($("storage-free"), error.message));
    await refreshStorage();
  };
  return select;
}

function sideBySide(name) {
  $("settings").close();
  compareWith(name).catch(complainLater);
}

function pulling(pull) {
  const amount = pull.made ? (pull.total ? `${Math.round((100 * pull.done) / pull.total)} %` : "") : pull.total ? `${bytes(pull.done)} of ${bytes(pull.total)}` : "";
  const bar = make("progress", { attributes: { "aria-label": `Fetching ${pull.name}` } });
  if (pull.total) Object.assign(bar, { max: pull.total, value: pull.done });
  const text = make("span", {}, make("b", {}, pull.name), make("span", { className: "quiet" }, pull.error ?? `${pull.stage} ${amount}`));
  const cancel = make("button", { type: "button", className: "text", attributes: { "aria-label": `Cancel ${pull.name}` } }, "Cancel");
  cancel.onclick = () => call("DELETE", `/swarmbench/storage/${encodeURIComponent(pull.name)}`).then(refreshStorage, (error) => say($("storage-free"), error.message));
  return make("li", { className: pull.error ? "bad" : "" }, text, ...(pull.finished ? [] : [bar]), ...(pull.finished ? [] : [cancel]));
}
