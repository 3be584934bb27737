// @ts-check
"use strict";
/** The panel at the right: what is known of the node or box that is selected; else how to read the page. */

/** @param {any} app */
X.panelOf = (app) => {
  const host = X.byId("panel"), live = X.byId("live");
  const rowsOf = new Map(); // by node, over all tables
  app.data.tables.forEach((/** @type {any} */ t) => t.rows.forEach((/** @type {any} */ row) => {
    const key = `${row.graph} ${row.node}`;
    rowsOf.set(key, [...(rowsOf.get(key) || []), { table: t, row }]);
  }));

  const entriesOf = (/** @type {string} */ name) => rowsOf.get(`${app.graphNumber} ${name}`) || [];

  const show = (/** @type {any} */ selected) => {
    host.textContent = "";
    host.append(...(!selected ? guide() : selected.node ? node(selected.node) : box(selected.box, selected.ribbon)));
    host.scrollTop = 0;
    document.body.classList.toggle("chosen", Boolean(selected));
    live.textContent = !selected ? "nothing selected" : selected.node ? `${selected.node.op} ${selected.node.value} in ${selected.node.module || "the model"}`
      : `${X.pathOf(selected.box)}, ${X.count(selected.box.nodes.fw + selected.box.nodes.bw, "operation")}`;
  };

  const guide = () => [
    X.el("h2", { text: "What was done" }),
    ...app.data.head.map((/** @type {string} */ line) => X.el("p", { text: line })),
    X.el("h3", { text: "How to read the graph" }),
    X.el("p", { text: "The forward runs down the left column, the backward up the right one: each module stands beside its own backward. "
      + "A ribbon is what the forward saves for the backward; its width goes with the bytes, its colour says what happened to it." }),
    X.el("p", { text: "Click a box to see what was done there and why. Click twice, or press Enter, to open it." }),
    X.el("h3", { text: "Start with a question" }),
    X.el("div", { class: "questions" }, [
      ask("Which tensor is the peak?", () => app.tab("memory")),
      ask("What was left as it was, and why?", () => { app.tab("tables"); app.tables.open("skips"); }),
      ask("Where do the bytes go?", () => app.tab("bytes")),
    ]),
    X.el("h3", { text: "Keys" }),
    X.el("dl", { class: "keys" }, [["arrows", "to the next box"], ["Enter", "open or close"], ["Backspace", "close what is around"],
      ["+  −  0", "larger, smaller, all"], ["/", "search"], ["Esc", "select nothing"]].flatMap(([key, what]) => [X.el("dt", { text: key }), X.el("dd", { text: what })])),
  ];
  const ask = (/** @type {string} */ text, /** @type {Function} */ go) => X.el("button", { type: "button", text, on: { click: go } });

  const facts = (/** @type {[string, any][]} */ pairs) => X.el("dl", { class: "facts" }, pairs.filter(([, value]) => value !== "" && value !== null)
    .flatMap(([key, value]) => [X.el("dt", { text: key }), X.el("dd", {}, [value instanceof Node ? value : document.createTextNode(String(value))])]));
  const link = (/** @type {any} */ n) => X.el("button", { type: "button", class: "link", text: `${n.name}`, title: `${n.op} ${n.value} ${n.module}`,
    on: { click: () => app.view.reveal({ node: n, box: app.view.tree.home.get(n) }) } });
  const links = (/** @type {any[]} */ nodes) => (nodes.length ? X.el("span", {}, nodes.slice(0, 12).flatMap((n, at) => [at ? ", " : "", link(n)])
    .concat(nodes.length > 12 ? [` and ${nodes.length - 12} more`] : [])) : "");
  const fate = (/** @type {string} */ name) => X.el("span", { class: "fate" }, [X.el("i", { style: `background:var(${X.FATES[name].colour})` }), X.FATES[name].label]);

  const node = (/** @type {any} */ n) => {
    const kept = n.kept, subject = /\((.*?)[,)]/.exec(n.spliced)?.[1];
    const about = entriesOf(n.name).concat(n.was ? entriesOf(n.was) : []).filter((/** @type {any} */ e) => X.isAbout(e.row, n, e.table));
    const rows = subject && n.side === "fw" && !about.length ? entriesOf(subject).filter((/** @type {any} */ e) => e.table.name === "saved") : about;
    return [
      X.el("h2", { text: n.op === "input" || n.op === "output" ? n.op : X.short(n.op) }),
      n.diff ? X.el("p", { class: `diff ${n.diff}`, text: `${n.diff} by this pass` }) : "",
      facts([["node", n.name], ["value", n.value], ["bytes", n.nbytes ? `${X.human(n.nbytes)} (${n.nbytes.toLocaleString("en")})` : ""],
        ["in", `${n.side === "fw" ? "forward" : "backward"}`], ["module", n.module ? app.moduleLink(n.module) : "the model itself"], ["written at", n.source],
        ["put in by fp8compile", n.spliced || (n.was && `FP32 island (was ${n.was})`)], ["operation", n.op === "input" ? "" : n.op], ["arguments", n.args],
        ["reads", links(n.from)], ["read by", links(n.to)]]),
      ...(kept ? [X.el("h3", { text: "Saved for the backward" }), facts([["what happened", fate(kept.fate)], ["why", kept.label],
        ["bytes", kept.nbytes ? X.human(kept.nbytes) : "none of its own"], ["its memory", kept.storage],
        [n === kept.from ? "used in the backward as" : "made in the forward as", link(n === kept.from ? kept.to : kept.from)]])] : []),
      ...(rows.length ? [X.el("h3", { text: "What the report says" }), ...rows.map(card)] : []),
    ];
  };

  const card = (/** @type {any} */ { table, row }) => X.el("div", { class: "card" }, [
    X.el("h4", { text: table.title }),
    facts(table.columns.map(([title, kind]) => title).map((/** @type {string} */ title, /** @type {number} */ at) => [title,
      app.cell(row.cells[at], table.columns[at][1])]).filter((/** @type {any} */ [title, value]) => title !== "runs" || value !== "1")),
  ]);

  const box = (/** @type {any} */ b, /** @type {any} */ ribbon) => {
    const isOpen = app.view.open.has(b.key), within = b.kind === "group" ? [] : entries(b);
    const bytes = Object.entries(b.bytes).filter(([, n]) => /** @type {number} */ (n) > 0).sort((x, y) => /** @type {any} */ (y[1]) - /** @type {any} */ (x[1]));
    return [
      X.el("h2", { text: b.kind === "root" ? "model" : X.pathOf(b) }),
      b.kind === "root" ? "" : X.el("button", { type: "button", class: "open", text: isOpen ? "Close" : "Open", on: { click: () => app.view.toggle(b) } }),
      facts([["operations", `${b.nodes.fw.toLocaleString("en")} forward, ${b.nodes.bw.toLocaleString("en")} backward`],
        ...bytes.map(([name, n]) => [fate(name), X.human(/** @type {number} */ (n))])].map(([k, v]) => (k instanceof Node ? ["saves", X.el("span", {}, [`${v} `, k])] : [k, v]))),
      ...(ribbon ? [X.el("h3", { text: "This ribbon" }), facts([["what happened", fate(ribbon.fate)], ["bytes", X.human(ribbon.nbytes)]]),
        X.el("ul", { class: "plain" }, [...new Map(ribbon.kept.map((/** @type {any} */ k) => [k.storage, k])).values()].slice(0, 40).map((/** @type {any} */ k) => X.el("li", {}, [
          link(k.from), ` ${k.from.value}, ${X.human(k.nbytes)}: ${k.label}`])))] : []),
      ...reasons(within),
    ];
  };
  const first = ["skips", "linears", "saved"];
  const entries = (/** @type {any} */ b) => [...app.data.tables].sort((x, y) => (first.indexOf(x.name) + 9) % 9 - (first.indexOf(y.name) + 9) % 9).map((/** @type {any} */ table) => ({ table,
    rows: table.rows.filter((/** @type {any} */ row) => row.graph === app.graphNumber && X.isIn(b, row.cells[0])) })).filter((/** @type {any} */ e) => e.rows.length);

  /** Rows of each table, alike ones once. */
  const reasons = (/** @type {any[]} */ within) => within.flatMap(({ table, rows }) => {
    const shown = table.columns.map(([title], /** @type {number} */ at) => at).filter((/** @type {number} */ at) => !["module", "source", "runs"].includes(table.columns[at][0]));
    const groups = new Map();
    rows.forEach((/** @type {any} */ row) => {
      const key = shown.map((/** @type {number} */ at) => row.cells[at]).join("\u0000");
      groups.set(key, [...(groups.get(key) || []), row]);
    });
    if (table.name === "linears") return linears(table, rows);
    return [X.el("h3", { text: `${table.title} (${rows.length})` }), ...[...groups.values()].slice(0, 30).map((alike) => X.el("div", { class: "card" }, [
      X.el("div", { class: "cardhead" }, [X.el("button", { type: "button", class: "link", text: alike[0].cells[0] || "model", on: { click: () => app.goTo(alike[0]) } }),
        alike.length > 1 ? X.el("span", { class: "soft", text: ` and ${alike.length - 1} more` }) : ""]),
      facts(shown.map((/** @type {number} */ at) => [table.columns[at][0], app.cell(alike[0].cells[at], table.columns[at][1])])),
    ])), groups.size > 30 ? X.el("p", { class: "soft", text: `${groups.size - 30} more in the tables` }) : ""];
  });

  /** A card for each linear, a line for each of its matmuls. */
  const linears = (/** @type {any} */ table, /** @type {any[]} */ rows) => {
    const modules = new Map();
    rows.forEach((row) => modules.set(row.cells[0], [...(modules.get(row.cells[0]) || []), row]));
    return [X.el("h3", { text: `${table.title} (${rows.length})` }), ...[...modules].slice(0, 30).map(([module, of]) => X.el("div", { class: "card" }, [
      X.el("button", { type: "button", class: "link", text: module || "model", on: { click: () => app.goTo(of[0]) } }),
      facts(of.map((/** @type {any} */ row) => [row.cells[1], `${row.cells[5]}, ${row.cells.slice(2, 5).join("×")}`])),
    ]))];
  };

  app.view.chosen.on(show);
  app.view.changed.on(() => {
    const button = host.querySelector(".open");
    if (button && app.view.selected) button.textContent = app.view.open.has(app.view.selected.box.key) ? "Close" : "Open";
  });
  return { show };
};
