// A graph from a file: read by the server, shown with its nodes, and asked instead of the specialists.

import { call } from "./api.js";
import { $, make, say } from "./dom.js";

let loaded = null; // {file, text, name, inputs, nodes, given}: `given` has the inputs beside the message box's
let limit = 0; // characters of a file, as the server says
let changed = () => {};

/** The graph that is asked, or null: then it is the specialists. */
export const graph = () => loaded;

/** What starts a run of the graph, the message box's text being its first input. */
export function graphOrder(question) {
  const { file, text, inputs, given } = loaded;
  const values = inputs.map((name, i) => [name, i ? (given[name] ?? "") : question]);
  return { file, text, inputs: Object.fromEntries(values) };
}

/** `told` is called when another graph is chosen, or none. */
export function setUpGraph(maxGraph, told) {
  limit = maxGraph;
  changed = told;
  $("graph-open").onclick = () => {
    show();
    $("graph").showModal();
  };
  $("graph-none").onclick = () => {
    $("graph-file").value = "";
    choose(null);
  };
  $("graph-file").onchange = () => {
    const [file] = $("graph-file").files;
    if (file) read(file).catch((error) => refuse(error.message));
  };
}

/** Let the server read a file. What is wrong with it is said with its line; the graph that was chosen stays. */
async function read(file) {
  if (file.size > 4 * limit) throw new Error(`${file.name} has ${file.size} bytes; at most ${limit} characters are read`);
  refuse("");
  const text = await file.text();
  const described = await call("POST", "/swarmbench/graphs", { file: file.name, text });
  choose({ file: file.name, text, given: {}, ...described });
}

function choose(next) {
  loaded = next;
  refuse("");
  show();
  changed();
}

function refuse(message) {
  $("graph-error").hidden = !message;
  say($("graph-error"), message);
}

function show() {
  $("graph-none").hidden = !loaded;
  $("graph-nodes").replaceChildren(...(loaded?.nodes ?? []).map(nodeLine));
  $("graph-inputs").replaceChildren(...(loaded?.inputs ?? []).map(inputField));
  say($("graph-name"), loaded ? `${loaded.name}: ${loaded.nodes.length} nodes, from ${loaded.file}` : "No graph: the specialists answer.");
}

function nodeLine({ name, task, needs }) {
  const after = needs.length ? `after ${needs.join(", ")} · ` : "";
  return make("li", {}, make("b", {}, name), make("span", { className: "quiet" }, after + task));
}

/** The first input is what the message box says; each other one has a field. */
function inputField(name, i) {
  if (!i) return make("p", { className: "quiet" }, `The message box gives the input ${name}.`);
  const input = make("textarea", { value: loaded.given[name] ?? "", rows: 2, maxLength: 20000, attributes: { "aria-label": `Input ${name}` } });
  input.onchange = () => (loaded.given[name] = input.value);
  return make("label", { className: "field" }, make("span", {}, name), input);
}
