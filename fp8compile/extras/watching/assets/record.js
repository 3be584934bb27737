"use strict";
// The cards at the side: a step's record, the steps with inf or NaN, what is known of the runs.

const NAMES = {
  loss: ["loss", number], scale: ["loss scale after it", power], headroom: ["headroom", (v) => `${number(v)} powers of two`],
  fp8_headroom: ["FP8 headroom", (v) => `${number(v)} powers of two`], clipped: ["clipped elements", number],
  fell_back: ["operands that fell back", number], seconds: ["time", seconds], tokens: ["tokens", number],
  tokens_per_s: ["tokens per second", number], memory: ["memory", bytes], memory_peak: ["memory, peak", bytes],
  nearest: ["nearest value", String], nearest_fp8: ["nearest operand", String],
};
const ELSEWHERE = new Set(["step", "time", "words", "overflow", "skipped", "sqnr", "sqnr_of"]);

function countsOf(layer) {
  const kinds = [["inf", layer.inf], ["NaN", layer.nan]].filter(([, count]) => count);
  if (layer.of === undefined) return kinds.map(([kind]) => kind).join(" and ") + ` among its ${layer.dtype} values`;
  return kinds.map(([kind, count]) => `${kind} in ${number(count)}`).join(" and ") + ` of ${number(layer.of)} ${layer.dtype} values`;
}

function overflowCard(overflow) {
  const { line, layers, count } = overflow;
  const began = element("p", { class: "began" },
    element("b", { text: `Began in ${placeOf(overflow)}` }), element("span", { text: String(line) }));
  if (!(layers || []).length) return [began];
  const rows = layers.map((layer) => element("li", {}, `${layerText(layer)} ${layer.op}`,
    element("small", { text: `${countsOf(layer)}${layer.source ? `, ${layer.source}` : ""}` })));
  const more = count > layers.length ? element("small", { text: `and ${count - layers.length} more` }) : null;
  return [began, element("h2", { text: "All that was inf or NaN, as it ran" }), element("ol", { class: "layers" }, ...rows), more];
}

function recordCard(run, record, several) {
  const rows = [];
  const add = (name, text) => rows.push(element("tr", {}, element("th", { scope: "row", text: name }), element("td", { text })));
  if (record.skipped) add("the step", "was skipped");
  for (const [key, value] of Object.entries(record)) {
    if (ELSEWHERE.has(key)) continue;
    const [name, format] = NAMES[key] || [key.replaceAll("_", " "), (v) => (typeof v === "number" ? number(v) : String(v))];
    add(name, value === null ? wordAt(record, key) || "–" : format(value));
  }
  for (const [state, value] of Object.entries(record.sqnr || {}))
    add(`${state} of ${record.sqnr_of}`, value === null ? wordAt(record, `sqnr.${state}`) === "inf" ? "exact" : "–" : decibels(value));
  if (record.time) add("at", new Date(record.time * 1000).toLocaleString());
  return [
    element("h2", { text: `Step ${number(record.step)}${several ? ` of ${run.name}` : ""}` }),
    ...(record.overflow ? overflowCard(record.overflow) : []),
    element("table", { class: "values-of" }, element("tbody", {}, ...rows)),
  ];
}

const MOST_LISTED = 1000; // overflows that have a button

// All places where inf or NaN began, of all runs: [{run, record, last, place}]. By step, but those that look like the loss
// scale's stand behind the others: it makes some in any run, as it tries how large it may be.
function overflowsOf(runs) {
  const all = runs.flatMap((run) => run.begun.map((each) => ({ run, ...each })));
  return all.sort((a, b) => isOfScale(a.record) - isOfScale(b.record) || a.record.step - b.record.step);
}

// Whether it looks like the loss scale's: forward and loss were finite, as far as is known, and the step was skipped.
function isOfScale(record) {
  const first = (record.overflow.layers || [])[0];
  return Boolean(record.skipped) && !wordAt(record, "loss") && (!first || first.direction === "backward");
}

function outcomeOf(record) {
  const loss = wordAt(record, "loss");
  const parts = [loss ? `loss ${loss}` : "", record.skipped ? "skipped" : "", record.skipped && record.scale ? `loss scale then ${power(record.scale)}` : ""];
  return parts.filter(Boolean).join(", ");
}

function overflowsCard(runs, selected, select) {
  const all = overflowsOf(runs);
  if (!all.length) return [];
  const buttons = all.slice(0, MOST_LISTED).map(({ run, record, last, place }) => {
    const steps = last > record.step ? `${number(record.step)} to ${number(last)}` : number(record.step);
    const current = selected !== null && record.step <= selected && selected <= last;
    const small = [outcomeOf(record), runs.length > 1 ? run.name : ""].filter(Boolean).join(" · ");
    return element("button", { type: "button", class: isOfScale(record) && "scale", "aria-current": current && "true", "data-step": record.step, on: { click: () => select(record.step, run) } },
      element("b", { text: steps }), place, small ? element("small", { text: small }) : null);
  });
  const more = all.length > MOST_LISTED ? element("small", { text: `and ${number(all.length - MOST_LISTED)} more: "step" above goes to any` }) : null;
  const ofScale = all.filter(({ record }) => isOfScale(record)).length;
  const note = ofScale ? element("small", { text: `Last: ${number(ofScale)} of skipped steps whose loss was finite, as a loss scale makes them` }) : null;
  return [element("h2", { text: "Where inf or NaN began" }), note, element("div", { class: "steps" }, ...buttons), more];
}

function aboutCard(runs) {
  const cards = [];
  for (const run of runs) {
    const header = run.headers[run.headers.length - 1];
    if (!header) continue;
    const rows = [
      ["model", `${header.model}, ${number(header.parameters)} parameters`], ["recipe", header.recipe], ["optimizer", header.optimizer],
      ["scaler", header.scaler], ["device", header.device], ["rank", header.world > 1 ? `${header.rank} of ${header.world}` : null],
      ["versions", Object.entries(header.versions || {}).map(([name, version]) => `${name} ${version}`).join(", ")],
      ["starts", run.headers.length > 1 ? `${run.headers.length}, the last shown` : null],
    ].filter(([, text]) => text !== null && text !== undefined && text !== "");
    cards.push(element("h2", { text: run.name }), element("dl", {}, ...rows.flatMap(([name, text]) => [element("dt", { text: name }), element("dd", { text: String(text) })])));
  }
  return cards;
}
