// @ts-check
"use strict";
/** Puts the page together; where it stands is in the address, so that a link leads there. */

const TABS = ["graph", "memory", "bytes", "tables"];

class App {
  /** @param {any} data */
  constructor(data) {
    this.data = data;
    this.graphNumber = Math.max(0, data.graphs.findIndex((/** @type {any} */ g) => g.passes.length));
    this.changed = X.signal();
    this.view = new View(data.graphs[this.graphNumber] || new Graph(NO_GRAPH, [""]));
    X.treeOf(this.view);
    this.panel = X.panelOf(this);
    this.tables = X.tablesOf(this);
    X.barsOf(this);
    this.timeline = X.timelineOf(this);
    this.search = X.searchOf(this);
    this.passes = X.passesOf(this);
    this.current = "graph";
    this.head();
    this.listen();
    this.view.changed();
    this.follow(location.hash);
    this.view.changed.on(() => this.remember());
    this.view.chosen.on(() => this.remember());
    this.changed.on(() => this.remember());
    if (!this.view.selected) this.panel.show(null);
    this.timeline.draw();
  }

  head() {
    X.byId("what").textContent = this.data.title;
    const { plain, ours } = this.data.waterfall;
    X.byId("figures").append(...(plain ? [X.el("b", { text: X.human(ours) }), ` saved for the backward instead of ${X.human(plain)} `, X.el("span", { class: "share", text: `${Math.round((100 * ours) / plain)} %` })] : []));
    const many = X.byId("graphs");
    many.hidden = this.data.graphs.length < 2;
    many.append(...this.data.graphs.map((/** @type {any} */ g, /** @type {number} */ n) => X.el("option", { value: n, text: `graph ${n + 1}: ${g.places.join(", ") || g.kind}${g.runs > 1 ? ` ×${g.runs}` : ""}` })));
    many.addEventListener("change", () => this.setGraph(+many.value));
    const empty = X.byId("empty");
    empty.hidden = this.view.stage.nodes.length > 0;
    if (!this.data.graphs.length) empty.textContent = "The report has no graph.";
    X.byId("legend").append(...Object.entries(X.FATES).filter(([name]) => this.view.stage.kept.some((/** @type {any} */ k) => k.fate === name)).map(([name, fate]) => {
      const f = /** @type {any} */ (fate), box = X.el("input", { type: "checkbox", checked: !this.view.scene.hidden.has(name), on: { change: () => { this.view.scene.hidden[box.checked ? "delete" : "add"](name); this.view.scene.draw(); } } });
      return X.el("label", { title: f.hint }, [box, X.el("i", { style: `background:var(${f.colour})` }), f.label]);
    }));
  }

  /** @param {number} number */
  setGraph(number) {
    this.graphNumber = number;
    X.byId("graphs").value = String(number);
    this.view.selected = null;
    this.view.setGraph(this.data.graphs[number]);
    this.passes.fill();
    this.panel.show(null);
    this.timeline.draw();
    X.byId("empty").hidden = this.view.stage.nodes.length > 0;
  }

  /** @param {string} name */
  tab(name) {
    this.current = name;
    TABS.forEach((each) => {
      X.byId(`tab-${each}`).setAttribute("aria-selected", String(each === name));
      X.byId(`view-${each}`).hidden = each !== name;
    });
    document.body.dataset.tab = name;
    if (name === "memory") this.timeline.again();
    this.changed();
  }

  /** A cell of a table as text. @param {any} value @param {string} kind */
  cell(value, kind) {
    return kind === "bytes" ? (value ? X.human(value) : "-") : kind === "number" ? value.toLocaleString("en") : value || "-";
  }

  /** To the node of a row; where a pass has replaced it, to its module. @param {any} row */
  goTo(row) {
    if (row.graph !== this.graphNumber) this.setGraph(row.graph);
    const table = this.data.tables.find((/** @type {any} */ t) => t.name === row.table);
    this.goToName(row.node, row.cells[0], (/** @type {any} */ node) => X.isAbout(row, node, table));
  }

  /** To the node of a name that fits, or else to the module. @param {string} name @param {string} module @param {(node: any) => boolean} fits */
  goToName(name, module, fits) {
    this.tab("graph");
    const node = [`fw:${name}`, `bw:${name}`].map((key) => this.view.stage.byKey.get(key)).find((each) => each && fits(each));
    if (node) { this.view.reveal({ node, box: this.view.tree.home.get(node) }); return; }
    for (let path = module; path; path = path.split(".").slice(0, -1).join(".")) {
      const box = this.view.tree.byKey.get(path);
      if (box) { this.view.reveal({ node: null, box }); return; }
    }
    this.view.select(null);
  }

  /** @param {string} module */
  moduleLink(module) {
    return X.el("button", { type: "button", class: "link", text: module, on: { click: () => this.goToName("", module, () => false) } });
  }

  remember() {
    const v = this.view, p = new URLSearchParams();
    if (this.current !== "graph") p.set("tab", this.current);
    if (this.current === "tables") p.set("table", this.tables.state.name);
    if (this.graphNumber) p.set("graph", String(this.graphNumber));
    if (v.pass >= 0) p.set("pass", `${v.graph.passes[v.pass].name}.${this.passes.when()}`);
    if (v.selected) p.set(v.selected.node ? "node" : "module", v.selected.node ? v.selected.node.key : v.selected.box.key);
    this.address = `#${p}`;
    history.replaceState(null, "", this.address);
  }

  /** Goes where a link says; what is not there is left out. @param {string} hash */
  follow(hash) {
    const p = new URLSearchParams(hash.replace(/^#/, ""));
    const graph = Number(p.get("graph") || 0);
    if (graph !== this.graphNumber && this.data.graphs[graph] && p.has("graph")) this.setGraph(graph);
    const [pass, when] = (p.get("pass") || "").split(".");
    if (pass) this.passes.choose(pass, when === "before" ? "before" : "after");
    const node = this.view.stage.byKey.get(p.get("node") || ""), box = p.get("module") ? this.view.tree.byKey.get(p.get("module")) : null;
    if (node) this.view.reveal({ node, box: this.view.tree.home.get(node) }); else if (box) this.view.reveal({ node: null, box });
    if (p.get("table")) this.tables.open(p.get("table"));
    this.tab(TABS.includes(p.get("tab") || "") ? p.get("tab") : "graph");
  }

  listen() {
    TABS.forEach((name, at) => {
      const tab = X.byId(`tab-${name}`);
      tab.addEventListener("click", () => this.tab(name));
      tab.addEventListener("keydown", (/** @type {any} */ e) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[/** @type {"ArrowRight"} */ (e.key)];
        if (step) { const next = TABS[(at + step + TABS.length) % TABS.length]; this.tab(next); X.byId(`tab-${next}`).focus(); }
      });
    });
    addEventListener("hashchange", () => { if (location.hash !== this.address) this.follow(location.hash); });
    addEventListener("keydown", (e) => { if (e.key === "/" && !/INPUT|SELECT/.test(/** @type {any} */ (e.target).tagName)) { e.preventDefault(); X.byId("search").focus(); } });
    X.byId("zoom-in").addEventListener("click", () => this.view.zoom(1.25));
    X.byId("zoom-out").addEventListener("click", () => this.view.zoom(0.8));
    X.byId("zoom-fit").addEventListener("click", () => this.view.fit());
    X.byId("close-all").addEventListener("click", () => { this.view.openTheFirst(); });
    X.byId("menu").addEventListener("click", () => document.body.classList.toggle("tree-open"));
    X.byId("tree").addEventListener("click", (/** @type {any} */ e) => { if (!e.target.classList.contains("twist")) document.body.classList.remove("tree-open"); });
    X.byId("shut").addEventListener("click", () => this.view.select(null));
    X.byId("theme").addEventListener("click", () => this.theme());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.repaint());
  }

  theme() {
    const root = document.documentElement, dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    this.repaint();
  }

  repaint() {
    this.view.scene.readColours();
    this.view.scene.draw();
    this.timeline.again();
  }
}

const NO_GRAPH = { kind: "", runs: 1, places: [], remarks: [], nodes: {}, stages: [], passes: [], alike: [],
  kept: { forward: [] }, timelines: Object.fromEntries(["ours", "plain"].map((name) => [name, { operations: [], forward: 0, kinds: [], start: [] }])) };

try {
  X.app = new App(X.read());
  document.body.dataset.ready = "yes";
} catch (error) {
  document.body.dataset.ready = "no";
  X.byId("trouble").hidden = false;
  X.byId("trouble").textContent = error instanceof Error ? error.message : String(error);
  if (!(error instanceof Error && error.message.startsWith("This file holds"))) throw error;
}
