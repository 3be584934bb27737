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

function placeOf(layer) {
  return `${layer.module || "the model"} (${layer.direction})`;
}

function countsOf(layer) {
  const kinds = [["inf", layer.inf], ["NaN", layer.nan]].filter(([, count]) => count);
  if (layer.of === undefined) return kinds.map(([kind]) => kind).join(" and ") + ` among its ${layer.dtype} values`;
  return kinds.map(([kind, count]) => `${kind} in ${number(count)}`).join(" and ") + ` of ${number(layer.of)} ${layer.dtype} values`;
}

function overflowCard({ line, layers, count }) {
  const first = layers && layers[0];
  const began = element("p", { class: "began" },
    element("b", { text: first ? `Began in ${placeOf(first)}` : "Began in a layer that is not known" }),
    element("span", { text: String(line) }));
  if (!first) return [began];
  const rows = layers.map((layer) => element("li", {}, `${placeOf(layer)} ${layer.op}`,
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

function overflowsCard(runs, selected, select) {
  const buttons = [];
  for (const run of runs)
    for (const record of run.overflows.slice(0, 100)) {
      const first = (record.overflow.layers || [])[0];
      const text = `${first ? placeOf(first) : "not known"}${runs.length > 1 ? ` · ${run.name}` : ""}`;
      buttons.push(element("button", { type: "button", "aria-current": record.step === selected, "data-step": record.step, on: { click: () => select(record.step, run) } },
        element("b", { text: number(record.step) }), text));
    }
  if (!buttons.length) return [];
  return [element("h2", { text: "Steps with inf or NaN" }), element("div", { class: "steps" }, ...buttons)];
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
