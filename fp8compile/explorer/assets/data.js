// @ts-check
"use strict";
/**
 * The page's data as objects. A stage is a graph at one moment; its nodes are made when it is first looked at.
 *
 * @typedef {{row: number, name: string, key: string, kind: string, op: string, value: string, args: string, module: string,
 *   source: string, spliced: string, was: string, group: string, nbytes: number, view: boolean, reads: string[],
 *   side: "fw" | "bw", at: number, from: GraphNode[], to: GraphNode[], kept: Kept | null, diff: string}} GraphNode
 * @typedef {{from: GraphNode, to: GraphNode, storage: string, nbytes: number, label: string, fate: string}} Kept
 * @typedef {{nodes: GraphNode[], byKey: Map<string, GraphNode>, kept: Kept[], isCut: boolean, number: number}} Stage
 */

X.SCHEMA = "fp8compile.explorer/1";

/** Reads the element that holds the data. Throws an Error whose message is for the reader. */
X.read = () => {
  const data = JSON.parse(X.byId("data").textContent);
  if (data.schema !== X.SCHEMA) {
    throw new Error(`This file holds data of the version "${data.schema}"; this page reads "${X.SCHEMA}". `
      + "Write it again with one version of fp8compile: report.to_html(path).");
  }
  const text = data.strings;
  data.tables = data.tables.map((/** @type {any} */ t) => table(t, text));
  data.modules = data.modules.map((/** @type {number} */ n) => text[n]);
  data.graphs = data.graphs.map((/** @type {any} */ g) => new Graph(g, text));
  return data;
};

/** @param {any} t @param {string[]} text */
function table(t, text) {
  const isText = t.columns.map((/** @type {string[]} */ c) => c[1] === "text");
  const rows = t.rows.map((/** @type {any[]} */ row, /** @type {number} */ at) => ({
    graph: t.graph[at],
    node: text[t.node[at]],
    cells: row.map((cell, c) => (isText[c] ? text[cell] : cell)),
    table: t.name,
  }));
  return { ...t, rows };
}

class Graph {
  /** @param {any} raw @param {string[]} text */
  constructor(raw, text) {
    Object.assign(this, raw);
    /** @type {any} */ this.raw = raw;
    this.text = text;
    this.passes = raw.passes.map((/** @type {any} */ p, /** @type {number} */ n) => ({ ...p, number: n + 1 }));
    this.last = raw.stages.length - 1;
    if (this.passes.length) this.last = this.passes[this.passes.length - 1].after;
    /** @type {Map<number, Stage>} */ this.made = new Map();
    this.timelines = { ours: this.timeline("ours"), plain: this.timeline("plain") };
  }

  /** @param {string} name */
  timeline(name) {
    const raw = this.raw.timelines[name];
    const lives = raw.start.map((/** @type {number} */ start, /** @type {number} */ i) => ({
      name: this.text[raw.name[i]], value: this.text[raw.value[i]], module: this.text[raw.module[i]],
      kind: raw.kind[i], start, end: raw.end[i], nbytes: raw.nbytes[i],
    }));
    return { name, operations: raw.operations.map((/** @type {number} */ n) => this.text[n]), forward: raw.forward,
      kinds: raw.kinds, lives };
  }

  /** @param {number} number @returns {Stage} */
  stage(number) {
    let found = this.made.get(number);
    if (!found) this.made.set(number, (found = this.build(number)));
    return found;
  }

  /** @param {number} number @returns {Stage} */
  build(number) {
    const parts = this.raw.stages[number] || [];
    /** @type {GraphNode[]} */ const nodes = [];
    /** @type {Map<string, GraphNode>} */ const byKey = new Map();
    for (const part of parts) {
      /** @type {Map<string, GraphNode>} */ const known = new Map();
      for (const [first, count] of part.rows) {
        for (let row = first; row < first + count; row++) {
          const node = this.node(row);
          node.from = node.reads.map((name) => known.get(name)).filter((n) => n !== undefined);
          node.side = part.title ? (part.title === "backward" ? "bw" : "fw") : side(node);
          node.key = `${node.side}:${node.name}`;
          node.at = nodes.length;
          node.from.forEach((source) => source.to.push(node));
          known.set(node.name, node);
          byKey.set(node.key, node);
          nodes.push(node);
        }
      }
    }
    const stage = { nodes, byKey, kept: /** @type {Kept[]} */ ([]), isCut: parts.length > 1, number };
    stage.kept = number === this.last ? this.keptAtTheEnd(stage) : keptMeanwhile(stage);
    stage.kept.forEach((each) => { each.from.kept = each.to.kept = each; });
    return stage;
  }

  /** @param {number} row @returns {GraphNode} */
  node(row) {
    const n = this.raw.nodes;
    const text = (/** @type {string} */ column) => this.text[n[column][row]];
    const reads = n.reads[row].map((/** @type {number} */ each) => this.text[each]);
    const args = text("arguments").replace(/\$(\d+)/g, (/** @type {string} */ all, /** @type {string} */ at) => reads[+at] ?? all);
    return { row, name: text("name"), key: "", kind: text("kind"), op: text("op"), value: text("value"), args,
      module: text("module"), source: text("source"), spliced: text("spliced"), was: text("was"), group: text("group"),
      nbytes: n.nbytes[row], view: n.view[row] === 1, reads, side: "fw", at: 0, from: [], to: [], kept: null, diff: "" };
  }

  /** @param {any} stage @returns {Kept[]} */
  keptAtTheEnd(stage) {
    const k = this.raw.kept;
    /** @type {Kept[]} */ const found = [];
    k.forward.forEach((/** @type {number} */ name, /** @type {number} */ i) => {
      const from = stage.byKey.get(`fw:${this.text[name]}`), to = stage.byKey.get(`bw:${this.text[k.backward[i]]}`);
      if (from && to) {
        found.push({ from, to, storage: this.text[k.storage[i]], nbytes: k.nbytes[i], label: this.text[k.label[i]],
          fate: this.text[k.fate[i]] });
      }
    });
    return found;
  }

  /** What the pass at `index` added, removed, changed: sets `diff` on the nodes of both its stages. @param {number} index */
  compare(index) {
    const pass = this.passes[index];
    const before = this.stage(pass.before), after = this.stage(pass.after);
    const sums = { added: 0, removed: 0, changed: 0 };
    if (pass.before === pass.after) return sums;
    const name = (/** @type {GraphNode} */ n) => (before.isCut ? n.key : n.name); // each half has names of its own
    const old = new Map(before.nodes.map((n) => [name(n), n])), now = new Map(after.nodes.map((n) => [name(n), n]));
    const mark = (/** @type {GraphNode} */ n, /** @type {Map<string, GraphNode>} */ others, /** @type {"added"|"removed"} */ word) => {
      const other = others.get(name(n));
      n.diff = !other ? word : same(n, other) || n.kind === "output" ? "" : "changed";
      if (n.diff === word || (n.diff && word === "added")) sums[/** @type {"added"} */ (n.diff)] += 1;
    };
    after.nodes.forEach((n) => mark(n, old, "added"));
    before.nodes.forEach((n) => mark(n, now, "removed"));
    return sums;
  }

  /** No differences are shown. */
  forget() {
    this.made.forEach((stage) => stage.nodes.forEach((n) => { n.diff = ""; }));
  }
}

/** Whether a row of a table is about a node that bears its name: each half has names of its own, and a pass may replace a node.
 * @param {any} row @param {GraphNode} node @param {any} table */
X.isAbout = (row, node, table) => {
  const at = table.columns.findIndex((/** @type {string[]} */ c) => c[0] === "operation");
  if (at < 0) return node.kind === "matmul";
  const op = String(row.cells[at]);
  return op.endsWith("]") ? /getitem/.test(node.op) || node.kind === "input" : node.op.endsWith(op) || node.op === "input";
};

/** @param {GraphNode} a @param {GraphNode} b */
function same(a, b) {
  return a.op === b.op && a.value === b.value && a.args === b.args;
}

/** In a graph that is not cut yet: the backward is what depends on a tangent. @param {GraphNode} node @returns {"fw" | "bw"} */
function side(node) {
  return node.name.startsWith("tangents_") || node.from.some((source) => source.side === "bw") ? "bw" : "fw";
}

/** What goes from forward to backward before the end: by name where the graph is cut, along edges where it is not yet.
 * @param {any} stage @returns {Kept[]} */
function keptMeanwhile(stage) {
  /** @type {Kept[]} */ const found = [];
  const add = (/** @type {GraphNode} */ from, /** @type {GraphNode} */ to) => found.push({ from, to, storage: from.name,
    nbytes: from.kind === "input" ? 0 : from.nbytes, label: "handed to the backward", fate: from.kind === "input" ? "callers" : "plain" });
  for (const node of stage.nodes) {
    if (node.side !== "bw" || node.kind === "output") continue;
    if (stage.isCut && node.kind === "input") {
      const from = stage.byKey.get(`fw:${node.name}`);
      if (from) add(from, node);
    } else if (!stage.isCut) {
      node.from.filter((/** @type {GraphNode} */ each) => each.side === "fw").forEach((/** @type {GraphNode} */ each) => add(each, node));
    }
  }
  return found;
}
