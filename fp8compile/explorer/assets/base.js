// @ts-check
"use strict";
/** What all scripts of the page share: small helpers, and `X`, where each script puts what others use. */

/** @type {any} */
const X = {};

/**
 * An element. Text goes in by textContent alone, so no text of the data is ever read as HTML.
 * @param {string} tag
 * @param {Record<string, any>} [props] attributes; `text`, `on` (listeners) and `class` too
 * @param {(Node | string | null | undefined)[]} [children]
 * @returns {any}
 */
X.el = (tag, props = {}, children = []) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === "text") made.textContent = value;
    else if (name === "on") for (const [event, listener] of Object.entries(value)) made.addEventListener(event, listener);
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((each) => each !== null && each !== undefined));
  return made;
};

/** @param {string} id @returns {any} */
X.byId = (id) => document.getElementById(id);

/** Bytes as text: `1.5 MiB`. @param {number} bytes */
X.human = (bytes) => {
  const sign = bytes < 0 ? "−" : "";
  let value = Math.abs(bytes);
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024 || unit === "GiB") return `${sign}${unit === "B" ? value : value.toFixed(1)} ${unit}`;
    value /= 1024;
  }
  return "";
};

/** @param {number} count @param {string} one @param {string} [more] */
X.count = (count, one, more = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : more}`;

/** What happened to a value that the forward hands to the backward: its colour, and what the legend says. */
X.FATES = {
  stored: { colour: "--stored", label: "stored as codes", hint: "8-bit codes and scales, decoded in the backward" },
  operand: { colour: "--operand", label: "FP8 operand", hint: "codes that an FP8 matmul made, saved as they are" },
  left: { colour: "--left", label: "left, for a reason", hint: "saved as it is; click to read why" },
  exact: { colour: "--exact", label: "exact", hint: "saved as it is: no floating-point activation" },
  island: { colour: "--island", label: "FP32 island", hint: "a value that is computed in FP32" },
  callers: { colour: "--callers", label: "the caller's", hint: "parameters and data: there anyway, cost nothing" },
  plain: { colour: "--callers", label: "handed over", hint: "handed to the backward at this moment" },
};

/** The value of a colour of the style sheet. @param {string} name */
X.colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A list of listeners: `on(f)` adds one, calling it calls all. */
X.signal = () => {
  /** @type {Function[]} */
  const listeners = [];
  const send = (/** @type {any[]} */ ...args) => listeners.forEach((each) => each(...args));
  send.on = (/** @type {Function} */ listener) => listeners.push(listener);
  return send;
};

/** The operation without namespace and overload: `aten.mm.default` is `mm`. @param {string} op */
X.short = (op) => op.replace(/^(aten|prims|fp8compile)\./, "").replace(/\.(default|Tensor|Scalar|self|int|dim_IntList|\w*_\w*)$/, "");
