// Small things that all parts of the page use.

export const $ = (id) => document.getElementById(id);

/** An element with properties, a class or two, and children. Text is always text. */
export function make(tag, { className, dataset, attributes, ...properties } = {}, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  Object.assign(element, properties);
  Object.assign(element.dataset, dataset);
  for (const [name, value] of Object.entries(attributes ?? {})) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Set a text only where it differs: an unchanged one costs no layout. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Tell people who listen instead of looking; never once per token. */
export function announce(text) {
  const log = $("announcer");
  log.append(make("p", {}, text));
  while (log.childElementCount > 5) log.firstElementChild.remove();
}

export function bytes(size) {
  let value = size;
  for (const unit of ["B", "kB", "MB"]) {
    if (value < 1000) return `${value >= 100 || unit === "B" ? value.toFixed(0) : value.toFixed(1)} ${unit}`;
    value /= 1000;
  }
  return `${value.toFixed(1)} GB`;
}

export const seconds = (value) => (value < 10 ? `${value.toFixed(2)} s` : `${value.toFixed(1)} s`);

/** Ask in a dialog; resolves to the value of the button (with a field, to its text), or to null. */
export function ask({ title, text = "", buttons, field }) {
  const dialog = $("ask");
  say($("ask-title"), title);
  say($("ask-text"), text);
  $("ask-field").hidden = !field;
  if (field) {
    say($("ask-label"), field.label);
    Object.assign($("ask-input"), { value: field.value ?? "", type: field.type ?? "text" });
  }
  return new Promise((resolve) => {
    const end = (value) => {
      dialog.onclose = null;
      $("ask-input").onkeydown = null;
      dialog.close();
      resolve(value);
    };
    const accept = (value) => end(field && value !== null ? $("ask-input").value.trim() || null : value);
    $("ask-buttons").replaceChildren(
      ...buttons.map(({ label, value, kind }) =>
        make("button", { type: "button", className: `button ${kind ?? ""}`, onclick: () => accept(value) }, label),
      ),
    );
    $("ask-input").onkeydown = (event) => {
      if (event.key === "Enter") accept(true);
    };
    dialog.onclose = () => end(null);
    dialog.showModal();
    if (field) $("ask-input").select();
  });
}

/** Buttons marked `close` close their dialog, and so does a click beside it. */
export function closable(dialog) {
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog || event.target.closest(".close")) dialog.close();
  });
}
