"use strict";
// Lines of a run, read as they come. What is no JSON is counted, but for a last line that is still being written.

// The layer in which an overflow began.
function placeOf(overflow) {
  const first = (overflow.layers || [])[0];
  return first ? layerText(first) : "a layer that is not known";
}

function layerText(layer) {
  return `${layer.module || "the model"} (${layer.direction})`;
}

class Run {
  constructor(name, index) {
    this.name = name;
    this.index = index;
    this.shown = true;
    this.left_out = 0; // lines that a snapshot does not hold
    this.clear();
  }

  clear() {
    this.offset = 0; // bytes that are read, or left out
    this.cut = 0; // bytes between the header and the first line that is read
    this.within = false; // whether the next text begins within a line, whose rest is left out
    this.records = []; // by step, each step once
    this.headers = [];
    this.corrupt = 0;
    this.other = ""; // the schema of another version
    this.rest = ""; // of a line that has no end yet
    this.version = (this.version || 0) + 1; // changes with the records
  }

  // Leave out what stands before this byte of the file; what comes next may begin within a line.
  skipTo(offset) {
    this.cut = offset;
    this.offset = offset;
    this.within = true;
  }

  // More of the text; several calls are as one with all of it.
  take(text) {
    if (this.within) {
      const end = text.indexOf("\n");
      if (end < 0) return;
      this.within = false;
      text = text.slice(end + 1);
    }
    const lines = (this.rest + text).split("\n");
    this.rest = lines.pop();
    lines.forEach((line) => this.line(line));
    this.version += 1;
  }

  line(line) {
    if (!line.trim()) return;
    let value;
    try {
      value = JSON.parse(line);
    } catch {
      this.corrupt += 1;
      return;
    }
    if (value === null || typeof value !== "object") this.corrupt += 1;
    else if ("schema" in value) this.header(value);
    else if (Number.isSafeInteger(value.step)) this.step(value);
    else this.corrupt += 1;
  }

  header(value) {
    if (value.schema !== Run.schema) this.other = String(value.schema);
    this.headers.push(value);
  }

  // A step that comes again, after a start from a checkpoint, takes the place of itself and of all later ones.
  step(record) {
    if (this.other) return;
    let end = this.records.length;
    while (end && this.records[end - 1].step >= record.step) end -= 1;
    this.records.length = end;
    this.records.push(record);
  }

  get last() {
    return this.records[this.records.length - 1];
  }

  at(step) {
    let low = 0, high = this.records.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.records[middle].step < step) low = middle + 1;
      else high = middle;
    }
    const found = this.records[low];
    return found && found.step === step ? found : undefined;
  }

  // Where inf or NaN began: in a step behind one without, or first in another layer than in the step before.
  // [{record, last, place}]; ``last`` is the last step that goes on with it.
  get overflows() {
    const found = [];
    let open = null;
    for (const record of this.records) {
      const place = record.overflow ? placeOf(record.overflow) : null;
      if (place === null) open = null;
      else if (open && open.place === place) open.last = record.step;
      else found.push(open = { record, last: record.step, place });
    }
    return found;
  }

  get remarks() {
    return this.records.filter((record) => record.remark).map((record) => String(record.remark));
  }

  get skipped() {
    return this.records.filter((record) => record.skipped);
  }
}
