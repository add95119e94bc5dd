// The model selector: what is in the store, at which precision, and the switch with whatever runs meanwhile.

import { call } from "./api.js";
import { $, announce, ask, bytes, say, seconds } from "./dom.js";

let state = { model: null };
let switching = null;

/** Fill the selector from the store. Gives what the server said of the store. */
export async function refreshModels() {
  const storage = await call("GET", "/swarmbench/storage");
  const select = $("model");
  const options = storage.models.map((model) => {
    const option = new Option(`${model.name} · ${model.weights ?? model.kind} · ${bytes(model.bytes)}`, model.name);
    option.defaultSelected = model.loaded;
    return option;
  });
  if (state.model && !storage.models.some((model) => model.name === state.model)) {
    options.unshift(new Option(state.model, state.model, true)); // served from a path, not from the store
  }
  if (!state.model) options.unshift(new Option("no model", ""));
  select.replaceChildren(...options);
  select.value = switching ?? state.model ?? "";
  return storage;
}

/** What `/swarmbench/state` says of the served model. */
export function showState(page) {
  const before = state.model;
  state = page;
  if (page.model !== before && !switching) refreshModels().catch(() => say($("connection-text"), "the store cannot be read"));
}

/** `busy` is called with true while a model is being loaded, `failed` with an error. */
export function setUpModels({ busy, failed }) {
  $("model").onchange = async () => {
    const name = $("model").value;
    let drain = null;
    try {
      const { calls } = await call("GET", "/swarmbench/state"); // what was heard last may be seconds old
      drain = calls ? await howToSwitch(name, calls) : 30;
    } catch (error) {
      failed(error);
    }
    if (!name || drain === null) {
      $("model").value = state.model ?? "";
      return;
    }
    await load(name, drain, busy, failed);
  };
}

function howToSwitch(name, calls) {
  const told = calls === 1 ? "One run or call is in flight." : `${calls} runs and calls are in flight.`;
  return ask({
    title: `Switch to ${name}?`,
    text: `${told} The switch can wait for what is in flight, for up to 30 seconds, or end it now.`,
    buttons: [
      { label: "Cancel", value: null },
      { label: "End it now", value: 0 },
      { label: "Let it finish", value: 30, kind: "primary" },
    ],
  });
}

async function load(name, drain, busy, failed) {
  const began = performance.now();
  switching = name;
  busy(true);
  announce(`Switching to ${name}`);
  $("progress").hidden = false;
  const tick = setInterval(async () => {
    const took = seconds((performance.now() - began) / 1000);
    const page = await call("GET", "/swarmbench/state").catch(() => null);
    if (!switching || !page) return;
    const waits = page.status === "loading" && page.calls;
    say($("connection-text"), waits ? `waiting for ${page.calls} in flight, ${took}` : `loading ${name}, ${took}`);
  }, 300);
  $("connection").dataset.state = "loading";
  try {
    await call("POST", "/models/load", { model: name, drain_s: drain });
    announce(`${name} is loaded`);
  } catch (error) {
    failed(error);
  } finally {
    clearInterval(tick);
    switching = null;
    state = { ...state, model: null };
    $("progress").hidden = true;
    busy(false);
  }
}
