"use strict";
// Numbers as text, and elements. Text from a run only ever becomes a text node.

function element(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "text") made.textContent = value;
    else if (name === "on") Object.entries(value).forEach(([event, run]) => made.addEventListener(event, run));
    else if (name === "style") Object.entries(value).forEach(([key, each]) => made.style.setProperty(key, each));
    else if (value !== false && value !== undefined) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e7 || size < 1e-3)) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

function bytes(value) {
  if (value === null || value === undefined) return "–";
  let unit = 0;
  for (; Math.abs(value) >= 1024 && unit < 4; unit += 1) value /= 1024;
  return `${unit ? value.toFixed(value < 10 ? 2 : 1) : value} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${number(value * 1000, 3)} ms`;
  return value < 600 ? `${number(value, 3)} s` : `${number(value / 60, 3)} min`;
}

function power(value) {
  if (value === null || value === undefined) return "–";
  const exponent = Math.log2(value);
  return Number.isInteger(exponent) ? `2^${exponent}` : number(value);
}

function decibels(value) {
  return value === null || value === undefined ? "–" : `${value.toFixed(1)} dB`;
}

// A number of a record by its path, "sqnr.exp_avg"; null where it has none, or one that JSON has not.
function valueAt(record, path) {
  let value = record;
  for (const part of path.split(".")) value = value === null || value === undefined ? undefined : value[part];
  return typeof value === "number" ? value : null;
}

// What a number was that JSON has not: "nan", "inf".
function wordAt(record, path) {
  return record.words && Object.hasOwn(record.words, path) ? record.words[path] : undefined;
}
