// @ts-check
"use strict";
/**
 * The tree of modules of a stage: what is drawn as one box until it is opened. A run is a box of layers that are alike; a group
 * is an encode, a decode, an island; "own" is a box of a module's operations outside of its children.
 *
 * @typedef {{key: string, label: string, kind: "root" | "module" | "run" | "group" | "own", parent: Box | null, children: Box[],
 *   own: {fw: any[], bw: any[]}, first: {fw: number, bw: number}, nodes: {fw: number, bw: number}, bytes: Record<string, number>,
 *   members: number, diff: {added: number, removed: number, changed: number}, depth: number}} Box
 */

/** @param {any} graph @param {any} stage @returns {{root: Box, byKey: Map<string, Box>, home: Map<any, Box>}} */
X.modules = (graph, stage) => {
  const runs = new Map();
  for (const [path, first, last] of graph.raw.alike) {
    for (let n = first; n <= last; n++) runs.set(path ? `${path}.${n}` : `${n}`, { path, first, last });
  }
  const root = box("", "model", "root", null);
  /** @type {Map<string, Box>} */ const byKey = new Map([["", root]]);
  /** @type {Map<string, Box>} */ const homes = new Map();
  /** @type {Map<any, Box>} */ const home = new Map();

  const child = (/** @type {Box} */ parent, /** @type {string} */ key, /** @type {string} */ label, /** @type {any} */ kind) => {
    let found = byKey.get(key);
    if (!found) {
      byKey.set(key, (found = box(key, label, kind, parent)));
      parent.children.push(found);
    }
    return found;
  };
  const ofModule = (/** @type {string} */ module) => {
    const known = homes.get(module);
    if (known) return known;
    let at = root, path = "";
    for (const part of module ? module.split(".") : []) {
      path = path ? `${path}.${part}` : part;
      const run = runs.get(path);
      if (run) {
        const name = `${run.first}–${run.last}`;
        at = child(at, `${run.path ? `${run.path}.` : ""}[${name}]`, name, "run");
        at.members = run.last - run.first + 1;
      }
      at = child(at, path, part, "module");
    }
    homes.set(module, at);
    return at;
  };
  for (const node of stage.nodes) {
    const module = ofModule(node.module);
    const key = `${node.module}/${node.group}/${node.side}`;
    const at = node.group ? child(module, key, node.group.split(" #")[0], "group") : module;
    home.set(node, at);
    at.own[/** @type {"fw"} */ (node.side)].push(node);
    for (let each = /** @type {Box | null} */ (at); each; each = each.parent) {
      const s = /** @type {"fw"} */ (node.side);
      each.nodes[s] += 1;
      if (each.first[s] < 0 || s === "bw") each.first[s] = node.at; // a backward is drawn from its end
      if (node.diff) each.diff[/** @type {"added"} */ (node.diff)] += 1;
    }
  }
  addBytes(stage, home);
  order(root, 0);
  gatherOwn(root, byKey, home);
  return { root, byKey, home };
};

/** @param {string} key @param {string} label @param {any} kind @param {Box | null} parent @returns {Box} */
function box(key, label, kind, parent) {
  return { key, label, kind, parent, children: [], own: { fw: [], bw: [] }, first: { fw: -1, bw: -1 }, nodes: { fw: 0, bw: 0 },
    bytes: {}, members: 1, diff: { added: 0, removed: 0, changed: 0 }, depth: 0 };
}

/** Bytes kept for the backward, by what happened to them, in each box that makes them; a storage counts once.
 * @param {any} stage @param {Map<any, Box>} home */
function addBytes(stage, home) {
  const seen = new Set();
  for (const kept of stage.kept) {
    if (seen.has(kept.storage)) continue;
    seen.add(kept.storage);
    for (let at = home.get(kept.from) ?? null; at; at = at.parent) {
      at.bytes[kept.fate] = (at.bytes[kept.fate] || 0) + kept.nbytes;
    }
  }
}

/** Children in the order of the forward; those without one behind them. @param {Box} at @param {number} depth */
function order(at, depth) {
  at.depth = depth;
  const place = (/** @type {Box} */ b) => (b.first.fw >= 0 ? b.first.fw : 1e9 - b.first.bw);
  at.children.sort((a, b) => place(a) - place(b));
  at.children.forEach((each) => order(each, depth + 1));
}

/** A box's own operations by the row that they stand behind: the last child that has begun before them. Those of closed groups
 * are among them. @param {any} box @param {any[]} children the boxes that have rows */
X.gaps = (box, children) => {
  const rowOf = new Map(children.map((each, at) => [each, at + 1]));
  const gaps = Array.from({ length: children.length + 1 }, () => ({ fw: /** @type {any[]} */ ([]), bw: /** @type {any[]} */ ([]) }));
  const inGroups = box.children.filter((/** @type {any} */ each) => each.kind === "group" && !rowOf.has(each));
  for (const side of /** @type {const} */ (["fw", "bw"])) {
    const sign = side === "fw" ? 1 : -1;
    const starts = children.filter((c) => c.nodes[side] > 0).sort((a, b) => sign * (a.first[side] - b.first[side]));
    const own = [...box.own[side], ...inGroups.flatMap((/** @type {any} */ each) => each.own[side])].sort((a, b) => sign * (a.at - b.at));
    let row = 0, next = 0;
    for (const node of own) {
      while (next < starts.length && sign * (node.at - starts[next].first[side]) > 0) row = Math.max(row, rowOf.get(starts[next++]));
      gaps[row][side].push(node);
    }
  }
  return gaps;
};

const MOST_OWN = 8;

/** Many operations of a module itself, between those of its children, become a box of their own. @param {Box} at
 * @param {Map<string, Box>} byKey @param {Map<any, Box>} home */
function gatherOwn(at, byKey, home) {
  const children = at.children.filter((each) => each.kind !== "group");
  children.forEach((each) => gatherOwn(each, byKey, home));
  if (!children.length) return;
  X.gaps(at, children).forEach((/** @type {any} */ gap, /** @type {number} */ row) => {
    if (gap.fw.length + gap.bw.length <= MOST_OWN) return;
    const made = box(`${at.key}/own/${row}`, "own operations", "own", at);
    byKey.set(made.key, made);
    for (const side of /** @type {const} */ (["fw", "bw"])) {
      made.own[side] = gap[side].filter((/** @type {any} */ n) => home.get(n) === at);
      made.nodes[side] = gap[side].length;
      made.first[side] = gap[side].length ? gap[side][0].at : -1;
      gap[side].forEach((/** @type {any} */ n) => { if (n.diff) made.diff[/** @type {"added"} */ (n.diff)] += 1; });
    }
    made.children = [...new Set([...gap.fw, ...gap.bw].map((n) => /** @type {Box} */ (home.get(n))).filter((each) => each !== at))];
    made.children.forEach((each) => { each.parent = made; });
    [...made.own.fw, ...made.own.bw].forEach((n) => home.set(n, made));
    at.own.fw = at.own.fw.filter((n) => home.get(n) === at);
    at.own.bw = at.own.bw.filter((n) => home.get(n) === at);
    at.children = at.children.filter((each) => !made.children.includes(each));
    at.children.splice(row ? at.children.indexOf(children[row - 1]) + 1 : 0, 0, made);
  });
}

/** What a box is called from outside. @param {Box} at */
X.pathOf = (at) => (at.kind === "root" ? "model" : at.kind === "group" || at.kind === "own" ? `${at.label} in ${at.parent ? X.pathOf(at.parent) : ""}`
  : at.kind === "run" ? `${at.key.replace(/[[\]]/g, "")} (${at.members} alike)` : at.key);

/** Whether a module path lies in a box. @param {Box} at @param {string} module */
X.isIn = (at, module) => {
  if (at.kind === "root") return true;
  if (at.kind === "own") return at.parent !== null && module === (at.parent.kind === "root" ? "" : at.parent.key);
  if (at.kind === "run") return at.children.some((each) => X.isIn(each, module));
  return module === at.key || module.startsWith(`${at.key}.`);
};
