"""The report's style sheet and its small script, kept as text so that the page is one file and an installed package
needs no data files.
"""

# ruff: noqa: E501  (one rule a line reads better than CSS folded at 120 characters)

from __future__ import annotations

# Series colours: Okabe and Ito's palette, darkened for white paper and lightened for the dark scheme; slot 0 is the
# baseline's neutral grey.
CSS = """
:root {
  color-scheme: light dark;
  --paper: #fbfaf8; --card: #ffffff; --ink: #1d2024; --soft: #5a616b; --hair: #e4e1db; --grid: #ecebe7; --accent: #0067a8;
  --better: 0, 114, 178; --worse: 213, 94, 0; --worse-ink: 176, 72, 0; --tint: .34;
  --heat: 0, 84, 140; --heat-negative: 186, 76, 0; --on-full: #ffffff; --on-middle: var(--ink);
  --s0: #4b535d; --s1: #0072b2; --s2: #d55e00; --s3: #00875f; --s4: #b0528c; --s5: #8c6d00; --s6: #2d9fd8; --s7: #7a4fd0;
  --faint: #d3d0c9; --open: 110, 118, 128;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14161a; --card: #1b1e23; --ink: #e8e6e1; --soft: #a0a7b1; --hair: #31363e; --grid: #282c33; --accent: #6cb8ee;
    --better: 74, 168, 232; --worse: 255, 138, 76; --worse-ink: 255, 138, 76; --tint: .36;
    --heat: 108, 184, 238; --heat-negative: 255, 138, 76; --on-full: #14161a; --on-middle: #14161a;
    --s0: #b6bec9; --s1: #4aa8e8; --s2: #ff8a4c; --s3: #36c997; --s4: #e293c3; --s5: #e3bd45; --s6: #8fd2f7; --s7: #b59af0;
    --faint: #4a515c; --open: 160, 167, 177;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1128px; margin: 0 auto; padding: 44px 24px 72px; }
h1, h2 { font-family: "Iowan Old Style", "Palatino Linotype", Palatino, "Book Antiqua", Georgia, serif; font-weight: 600; line-height: 1.18; text-wrap: balance; }
h1 { font-size: clamp(27px, 4.3vw, 44px); letter-spacing: -.012em; margin: 10px 0 16px; max-width: 24em; overflow-wrap: anywhere; }
h1.long { font-size: clamp(25px, 3.2vw, 34px); max-width: 30em; }
h2 { font-size: 25px; margin: 60px 0 6px; }
h3 { font-size: 15px; font-weight: 650; margin: 0 0 10px; }
p { margin: 0 0 12px; }
a { color: var(--accent); }
.eyebrow { color: var(--soft); font-size: 13px; letter-spacing: .04em; margin: 0; }
.lead { color: var(--soft); font-size: 17px; max-width: 46em; }
.intro { color: var(--soft); max-width: 50em; margin-bottom: 18px; }
code, pre, .mono { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: .88em; }
.notice { border-left: 4px solid rgb(var(--worse)); background: rgba(var(--worse), .09); padding: 12px 16px; border-radius: 0 6px 6px 0; margin: 22px 0; }
.notice p:last-child { margin: 0; }

.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(205px, 1fr)); gap: 14px; margin: 30px 0 0; padding: 0; list-style: none; }
.tiles li { background: var(--card); border: 1px solid var(--hair); border-radius: 10px; padding: 15px 18px 13px; }
.tiles b { display: block; font-size: 30px; line-height: 1.2; font-weight: 620; letter-spacing: -.02em; font-variant-numeric: tabular-nums; }
.tiles span { display: block; color: var(--soft); font-size: 13.5px; line-height: 1.4; margin-top: 3px; }

.card { background: var(--card); border: 1px solid var(--hair); border-radius: 10px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 11px 14px; border-top: 1px solid var(--hair); vertical-align: top; }
thead th { border-top: 0; color: var(--soft); font-weight: 500; font-size: 13px; line-height: 1.3; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
tbody th { font-weight: 600; }
td b { font-weight: 600; }
th.left, td.left { text-align: left; }
.sub { display: block; color: var(--soft); font-size: 13px; font-weight: 400; line-height: 1.4; }
.formula { display: block; color: var(--soft); font-size: 12.5px; font-weight: 400; line-height: 1.45; max-width: 27em; overflow-wrap: anywhere; }
h3 .aside { font-weight: 400; }
.aside { color: var(--soft); margin-left: 8px; white-space: nowrap; }
sub { font-size: .78em; line-height: 0; }
.best { color: var(--accent); }
.swatch { display: inline-block; vertical-align: -2px; margin-right: 8px; }
.swatch svg { display: block; overflow: visible; }
/* Differences on an axis around zero: s is zero or a border, i the interval, u a seed, b the mean. */
.forest { display: block; position: relative; height: 18px; min-width: 130px; margin-top: 3px; --f: var(--open); }
.forest s { position: absolute; top: -5px; bottom: -5px; width: 0; border-left: 1px solid var(--soft); text-decoration: none; }
.forest s.border { border-left-style: dashed; opacity: .6; }
.forest i { position: absolute; top: 6px; height: 6px; border-radius: 3px; background: rgba(var(--f), .38); }
.forest i.cut-low { border-left: 3px double rgb(var(--f)); border-radius: 0 3px 3px 0; } .forest i.cut-high { border-right: 3px double rgb(var(--f)); border-radius: 3px 0 0 3px; }
.forest u { position: absolute; top: 4px; height: 10px; width: 1px; background: rgba(var(--f), .85); text-decoration: none; }
.forest b { position: absolute; top: 4px; width: 10px; height: 10px; margin-left: -5px; border-radius: 50%; background: rgb(var(--f)); }
.forest.better { --f: var(--better); } .forest.worse { --f: var(--worse); }
.forest q { position: absolute; top: 4px; width: 9px; height: 9px; margin-left: -5px; border: 1.5px solid var(--soft); background: var(--card); transform: rotate(45deg); quotes: none; }
.forest-axis { display: block; position: relative; height: 17px; margin: 0 2px; }
.forest-axis em { position: absolute; transform: translateX(-50%); font-style: normal; font-size: 11.5px; color: var(--soft); font-weight: 400; font-variant-numeric: tabular-nums; }
.results .forest { margin: 6px 0; }
.axis-row td { padding-top: 9px; padding-bottom: 2px; text-align: left; } .axis-row + tr > * { border-top: 0; }
.axis-row .sub { font-size: 11.5px; }
.claims { table-layout: auto; } .claims .bars { width: 27%; padding-top: 12px; } .claims td.number .sub, .results td.number .sub { white-space: nowrap; } .claims .relation { color: var(--soft); font-weight: 400; } .claims .paper { width: 19%; color: var(--soft); font-size: 13.5px; } .claims td .sub { text-wrap: pretty; }
.claims tbody th { min-width: 11em; overflow-wrap: anywhere; }
.dots { margin: 4px 0; } .dots th, .dots td { padding: 4px 10px; border: 0; vertical-align: middle; } .dots .bars { width: 64%; } .dots th { white-space: nowrap; font-size: 14px; } .dots td .sub { font-size: 12px; }
.dots tr:nth-child(even) { background: rgba(var(--open), .06); }
.paper-table .bars { width: 24%; } .paper-table td.bars { padding-top: 12px; } .results td .sub, .results td .aside { text-wrap: balance; }
.paper-table .source { color: var(--soft); font-size: 13px; } section > h3 { margin: 18px 0 8px; }
.chip { display: inline-block; font-size: 13px; font-weight: 600; line-height: 1.45; padding: 1px 9px; border-radius: 99px; color: rgb(var(--k)); background: rgba(var(--k), .12); white-space: nowrap; --k: var(--open); }
.chip.better { --k: var(--better); } .chip.worse { --k: var(--worse-ink); }
.chips { display: flex; flex-wrap: wrap; align-items: baseline; gap: 6px 9px; list-style: none; padding: 0; margin: 16px 0 0; } .chips .chip { font-size: 15px; padding: 3px 13px; font-weight: 500; } .said { color: var(--soft); font-size: 14px; }
.index-table tbody th { width: 30%; } .index-table td:last-child { white-space: nowrap; } .index-table td.left { min-width: 9em; } .index-table .chip { margin-bottom: 3px; }
.question { font-size: 18px; max-width: 44em; margin: 0 0 8px; }
.cost th, .cost td { padding-top: 6px; padding-bottom: 6px; }
.total th, .total td { border-top: 2px solid var(--hair); font-weight: 600; }
.verdict { font-weight: 600; white-space: nowrap; } .verdict .sub { white-space: normal; }

.legend { display: flex; flex-wrap: wrap; gap: 6px 10px; margin: 4px 0 14px; padding: 0; list-style: none; }
.legend button { font: inherit; font-size: 14px; color: inherit; background: none; border: 1px solid var(--hair); border-radius: 99px; padding: 3px 12px 3px 10px; cursor: default; max-width: 100%; overflow-wrap: anywhere; text-align: left; }
.js .legend button { cursor: pointer; }
.legend button[aria-pressed="false"] { opacity: .42; text-decoration: line-through; }
.legend button:focus-visible, summary:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
.charts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; }
.charts.small { grid-template-columns: repeat(3, minmax(0, 1fr)); }
.chart.hero { grid-column: 1 / -1; }
figure { margin: 0; }
.needs-js { display: none; } .js .needs-js { display: block; }
.chart { background: var(--card); border: 1px solid var(--hair); border-radius: 10px; padding: 18px 18px 14px; min-width: 0; }
figcaption { color: var(--soft); font-size: 13.5px; line-height: 1.45; margin-top: 8px; }
.plot { position: relative; }
.plot svg { display: block; width: 100%; height: auto; overflow: visible; touch-action: pan-y; }
.plot svg.narrow { display: none; }
.plot text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--soft); font-variant-numeric: tabular-nums; }
.plot text.end { font-weight: 600; font-size: 12.5px; }
.grid { stroke: var(--grid); } .axis, .zero { stroke: var(--soft); } .zero { stroke-dasharray: 5 4; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.line.faint { stroke-width: 1.2; } .faint { --c: var(--faint); }
.band { fill: var(--c); stroke: none; opacity: .13; }
.leader { fill: none; stroke-width: 1; opacity: .5; }
.level { stroke: var(--s0); stroke-dasharray: 2 4; stroke-linecap: round; }
.plot text.note { font-size: 11.5px; }
.drop { stroke-width: 1; stroke-dasharray: 2 3; }
.cross { fill: var(--card); stroke-width: 2; }
.mark { stroke: var(--card); stroke-width: 1; }
.cursor { stroke: var(--soft); stroke-width: 1; opacity: 0; }
.plot .on .cursor { opacity: .8; }
.readout { position: absolute; top: 4px; pointer-events: none; background: var(--card); border: 1px solid var(--hair); border-radius: 8px; box-shadow: 0 4px 16px rgba(0, 0, 0, .16); padding: 8px 11px; font-size: 12.5px; line-height: 1.5; font-variant-numeric: tabular-nums; white-space: nowrap; z-index: 2; }
.readout[hidden] { display: none; }
.readout div { display: flex; gap: 14px; justify-content: space-between; }
.readout i { display: inline-block; width: 9px; height: 9px; border-radius: 50%; margin-right: 7px; }
.off { display: none; }
.empty { color: var(--soft); }
.line, .leader, .drop, .cross { stroke: var(--c); } .mark, .swatch path { fill: var(--c); } .swatch line { stroke: var(--c); stroke-width: 2; } .plot text.end { fill: var(--c); } .readout i { background: var(--c); }
.s0 { --c: var(--s0); } .s1 { --c: var(--s1); } .s2 { --c: var(--s2); } .s3 { --c: var(--s3); } .s4 { --c: var(--s4); } .s5 { --c: var(--s5); } .s6 { --c: var(--s6); } .s7 { --c: var(--s7); }
.line.s0 { stroke-width: 2.4; }

.maps { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 430px), 1fr)); gap: 16px; }
.map { padding: 16px 18px; min-width: 0; }
.heat { border-collapse: separate; border-spacing: 3px; font-size: 13px; }
.heat th, .heat td { border: 0; padding: 0 2px; text-align: center; vertical-align: middle; }
.heat th { color: var(--soft); font-weight: 500; font-size: 12px; }
.heat tbody th { text-align: left; padding-right: 6px; white-space: nowrap; }
.heat td { height: 42px; min-width: 34px; border-radius: 5px; }
.heat td.full { color: var(--on-full); } .heat td.middle { color: var(--on-middle); }
.heat td.raw { color: var(--soft); background: repeating-linear-gradient(135deg, var(--grid) 0 3px, transparent 3px 7px); }
.scale { display: flex; align-items: center; gap: 8px; color: var(--soft); font-size: 12.5px; margin: 14px 0 0; }
.scale i { flex: 0 0 150px; height: 9px; border-radius: 5px; }

.samples { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; }
.sample { padding: 16px 18px; margin: 0; min-width: 0; }
.sample blockquote { margin: 0; font-family: "Iowan Old Style", "Palatino Linotype", Palatino, Georgia, serif; font-size: 15.5px; line-height: 1.55; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 19em; overflow-y: auto; }
.sample mark { background: none; color: var(--accent); font-weight: 600; }
.limits { padding-left: 20px; max-width: 50em; } .limits li { margin-bottom: 9px; }
.limits { margin-top: 14px; }
.facts { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 5px 22px; margin: 0 0 18px; font-size: 14.5px; }
.facts dt { color: var(--soft); } .facts dd { margin: 0; overflow-wrap: anywhere; }
details { border-top: 1px solid var(--hair); padding: 10px 0; } details:last-of-type { border-bottom: 1px solid var(--hair); }
summary { cursor: pointer; font-weight: 600; font-size: 15px; }
pre { background: var(--card); border: 1px solid var(--hair); border-radius: 8px; padding: 13px 15px; overflow-x: auto; font-size: 12.8px; line-height: 1.5; margin: 12px 0; }
details table { font-size: 13.5px; margin: 12px 0; } details th, details td { padding: 6px 10px; }
footer { color: var(--soft); font-size: 13px; margin-top: 48px; }

@media screen and (max-width: 820px) {
  main { padding: 26px 16px 48px; }
  h2 { font-size: 22px; margin-top: 46px; }
  .charts, .charts.small, .samples { grid-template-columns: minmax(0, 1fr); }
  .claims, .claims tbody, .claims tr, .claims th, .claims td { display: block; text-align: left; width: auto; min-width: 0; } .claims .bars, .claims .paper { width: auto; }
  .claims thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  .claims tr { padding: 13px 14px; border-top: 1px solid var(--hair); } .claims th, .claims td { padding: 2px 0; border: 0; } .claims td[data-label]::before { content: attr(data-label) ": "; color: var(--soft); font-size: 12.5px; }
  .claims .axis-row { padding: 10px 14px 0; } .claims .axis-row td:empty { display: none; } .claims .axis-row + tr { border-top: 0; padding-top: 4px; } .claims td .sub { display: inline; margin-left: 6px; } .claims .axis-row td .sub { display: block; margin-left: 0; }
  .dots, .dots tbody { display: block; } .dots tr { display: grid; grid-template-columns: 1fr auto; gap: 0 8px; padding: 6px 8px 8px; } .dots th, .dots td { display: block; padding: 0; } .dots td:empty { display: none; } .dots th { white-space: normal; overflow-wrap: anywhere; font-size: 13px; } .dots td .sub { display: inline; margin-left: 6px; font-size: 11.5px; } .dots .bars, .dots .axis-row td { grid-column: 1 / -1; grid-row: 2; width: auto; } .dots .axis-row td .sub { display: block; margin: 0; }
  .tiles { grid-template-columns: 1fr 1fr; gap: 10px; } .tiles li { padding: 12px 13px 11px; } .tiles b { font-size: 23px; } .tiles span { font-size: 12.5px; }
  .results, .results tbody, .results tr, .results th, .results td { display: block; text-align: left; }
  .results thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  .results tr { padding: 15px 16px; border-top: 1px solid var(--hair); display: grid; grid-template-columns: 1fr 1fr; gap: 10px 16px; } .results tbody tr:first-child { border-top: 0; }
  .results th, .results td { padding: 0; border: 0; } .results tbody th { grid-column: 1 / -1; }
  .results td::before { content: attr(data-label); display: block; color: var(--soft); font-size: 12.5px; }
  .compact th, .compact td { padding: 8px 4px; font-size: 12.5px; } .compact .sub { font-size: 11px; } .compact td:not(.verdict) .sub { white-space: nowrap; } .compact .swatch { display: none; }
  .compact thead th { font-size: 12.5px; } .compact tbody th { overflow-wrap: anywhere; min-width: 7.7em; font-size: 12px; } .verdict { white-space: normal; }
  .map, .sample { padding: 14px 12px; } .heat { border-spacing: 2px; font-size: 12px; } .heat td { min-width: 29px; height: 38px; }
  .index-table tbody th { width: auto; } .index-table td.left { grid-column: 1 / -1; } .index-table td:empty { display: none; }
  .facts { grid-template-columns: minmax(0, 1fr); gap: 0; } .facts dd { margin-bottom: 9px; }
}
@media screen and (max-width: 560px) {
  .chart { padding: 14px 12px 12px; }
  .plot svg.wide { display: none; } .plot svg.narrow { display: block; }
}
@media print {
  :root { --paper: #fff; --card: #fff; --ink: #000; --soft: #444; --hair: #ccc; --grid: #e8e8e8; --accent: #004f85; --better: 0, 114, 178; --worse: 213, 94, 0; --worse-ink: 176, 72, 0; --faint: #d3d0c9; --open: 110, 118, 128;
    --heat: 0, 84, 140; --heat-negative: 186, 76, 0; --on-full: #ffffff; --on-middle: var(--ink);
    --s0: #4b535d; --s1: #0072b2; --s2: #d55e00; --s3: #00875f; --s4: #b0528c; --s5: #8c6d00; --s6: #2d9fd8; --s7: #7a4fd0; color-scheme: light; }
  @page { margin: 14mm; }
  body { font-size: 11.5px; -webkit-print-color-adjust: exact; print-color-adjust: exact; }
  main { max-width: none; padding: 0; } h1 { font-size: 26px; } h2 { font-size: 18px; margin-top: 24px; break-after: avoid; } .intro, figcaption { font-size: 11px; break-before: avoid; } .intro, .legend { break-after: avoid; }
  .lead { font-size: 12.5px; max-width: none; } .tiles { grid-template-columns: repeat(4, 1fr); gap: 8px; } .tiles li { padding: 9px 11px; } .tiles b { font-size: 20px; } .tiles span, .sub, .formula, thead th { font-size: 9.5px; }
  th, td { padding: 6px 8px; } .forest { min-width: 60px; } .charts.small { grid-template-columns: repeat(3, 1fr); } .chip { font-size: 10px; } .maps { grid-template-columns: 1fr 1fr; } .map { padding: 10px; } .heat { font-size: 9.5px; border-spacing: 1px; } .heat td { min-width: 0; height: 26px; } .sample blockquote { font-size: 11px; } .facts { font-size: 11px; }
  .needs-js, .js .needs-js { display: none; } details { font-size: 11px; padding: 6px 0; } summary { font-size: 11.5px; }
  .chart, .card, .tiles li, tr { break-inside: avoid; } .sample blockquote { max-height: none; }
  .card.scroll { break-inside: auto; overflow: visible; } .legend, .axis-row { break-inside: avoid; } .axis-row { break-after: avoid; }
  .forest-axis em { font-size: 8px; } .axis-row .sub { font-size: 8.5px; } .claims .paper, .paper-table .source { font-size: 10px; } .dots td .sub { white-space: nowrap; font-size: 9.5px; } .dots th { font-size: 11px; }
  .question { font-size: 13px; } .chips .chip, .said { font-size: 11px; } .legend button { font-size: 10.5px; padding: 1px 8px; } section > h3, .chart h3, .map h3 { font-size: 11.5px; }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; }
}
"""

# Without this script every chart is complete; with it, pointing at one reads off the values and a legend entry hides
# its line in all charts.
JS = """
(() => {
  document.documentElement.classList.add('js');
  const short = v => v >= 1e9 ? (v / 1e9).toPrecision(3) + 'B' : v >= 1e6 ? (v / 1e6).toPrecision(3) + 'M' : v >= 1e3 ? (v / 1e3).toPrecision(3) + 'k' : v.toFixed(0);
  const hidden = new Set();
  for (const button of document.querySelectorAll('.legend button')) {
    button.disabled = false;
    button.addEventListener('click', () => {
      const name = button.dataset.name, off = !hidden.has(name);
      hidden[off ? 'add' : 'delete'](name);
      for (const other of document.querySelectorAll('.legend button')) if (other.dataset.name === name) other.setAttribute('aria-pressed', String(!off));
      for (const node of document.querySelectorAll('.plot [data-name]')) if (node.dataset.name === name) node.classList.toggle('off', off);
    });
  }
  for (const figure of document.querySelectorAll('figure.chart')) {
    const source = figure.querySelector('script'), box = figure.querySelector('.readout');
    if (!source || !box) continue;
    const data = JSON.parse(source.textContent), plot = figure.querySelector('.plot');
    const clear = () => { box.hidden = true; plot.querySelectorAll('svg').forEach(s => s.classList.remove('on')); };
    const move = event => {
      const svg = event.currentTarget, [left, right, x0, x1] = JSON.parse(svg.dataset.frame), size = svg.getBoundingClientRect();
      const scale = size.width / svg.viewBox.baseVal.width, at = (event.clientX - size.left) / scale;
      if (at < left - 8 || at > right + 8) return clear();
      const want = x0 + (at - left) / (right - left) * (x1 - x0);
      const shown = data.series.filter(s => !hidden.has(s.name)).map(s => {
        let near = -1;
        s.x.forEach((x, i) => { if (s.y[i] !== null && (near < 0 || Math.abs(x - want) < Math.abs(s.x[near] - want))) near = i; });
        return near < 0 ? null : { name: s.name, slot: s.slot, x: s.x[near], y: s.y[near] };
      }).filter(Boolean);
      if (!shown.length) return clear();
      const x = shown.reduce((a, b) => Math.abs(b.x - want) < Math.abs(a.x - want) ? b : a).x;
      const px = left + (x - x0) / (x1 - x0) * (right - left);
      const cursor = svg.querySelector('.cursor');
      cursor.setAttribute('x1', px); cursor.setAttribute('x2', px); svg.classList.add('on');
      box.replaceChildren();
      const title = document.createElement('div'); title.textContent = data.unit === 'layer' ? 'layer ' + x : short(x) + ' tokens'; box.append(title);
      for (const s of shown.sort((a, b) => b.y - a.y)) {
        const line = document.createElement('div'), label = document.createElement('span'), dot = document.createElement('i'), value = document.createElement('b');
        dot.className = 's' + s.slot; label.append(dot, s.name);
        value.textContent = (data.signed && s.y > 0 ? '+' : '') + s.y.toFixed(3).replace('-', '\\u2212');
        line.append(label, value); box.append(line);
      }
      box.hidden = false;
      const place = px * scale, right_side = place + box.offsetWidth + 14 <= plot.clientWidth;
      box.style.left = (right_side ? place + 12 : Math.max(0, place - box.offsetWidth - 12)) + 'px';
    };
    for (const svg of plot.querySelectorAll('svg')) { svg.addEventListener('pointermove', move); svg.addEventListener('pointerdown', move); svg.addEventListener('pointerleave', clear); }
  }
})();
"""
