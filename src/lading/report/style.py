"""The look of the HTML report: one style sheet and one short script, both inlined."""

from __future__ import annotations

_LIGHT = """
--paper:#ffffff;--panel:#f6f7f9;--ink:#1c2430;--muted:#5a6676;--line:#d9dee5;--grid:#e6eaef;--lane:#f1f3f6;
--good:#1f7a4d;--bad:#b3261e;--open:#8a5a00;--accent:#2f5f98;--tint:#eef4fb;
--r-parameter:#3f6fa8;--r-optimizer_state:#7f63aa;--r-buffer:#7b8795;--r-constant:#a9b2bd;--r-input:#93a9bd;
--r-gradient:#d59a3c;--r-activation:#4aa394;--r-workspace:#bd6474;--r-other:#9a9a94;
--k-forward:#7eaede;--k-backward:#3768a6;--k-recompute:#d9902f;--k-step:#3f9b6b;--k-read:#8f74bd;--k-write:#c0627f;
--k-communication:#6f7c8b;--k-free:#a9b2bd;
"""
_DARK = """
--paper:#14181e;--panel:#1c222a;--ink:#e6eaf0;--muted:#9aa7b6;--line:#343d49;--grid:#272e38;--lane:#1f262f;
--good:#5fc790;--bad:#ff8a80;--open:#e5b55a;--accent:#7fb0e6;--tint:#1d2a3a;
--r-parameter:#5f92cf;--r-optimizer_state:#9d80cb;--r-buffer:#8693a3;--r-constant:#66717e;--r-input:#7a90a6;
--r-gradient:#dfa850;--r-activation:#56b3a3;--r-workspace:#cf7787;--r-other:#82827c;
--k-forward:#93bfec;--k-backward:#4a80c4;--k-recompute:#e2a04a;--k-step:#6fd3a0;--k-read:#a48bd3;--k-write:#d27a95;
--k-communication:#8693a3;--k-free:#66717e;
"""
_COLOURED = (
    *(f"r-{role}" for role in (
        "parameter", "optimizer_state", "buffer", "constant", "input", "gradient", "activation", "workspace", "other",
    )),
    *(f"k-{kind}" for kind in (
        "forward", "backward", "recompute", "step", "read", "write", "communication", "free",
    )),
)  # fmt: skip

_RULES = """
*{box-sizing:border-box}
html{color-scheme:light dark}
body{margin:0;background:var(--paper);color:var(--ink);
 font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,"DejaVu Sans",sans-serif}
main{max-width:1088px;margin:0 auto;padding:48px 24px 96px}
h1{font-size:28px;line-height:1.2;margin:0 0 6px;font-weight:650;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:19px;margin:56px 0 14px;font-weight:650;letter-spacing:-.005em}
p{margin:0 0 8px;max-width:78ch}
.muted{color:var(--muted)}
.subtitle{color:var(--muted);margin:0;overflow-wrap:anywhere}
.verdict{margin:28px 0 12px;padding:16px 20px;border-left:4px solid var(--tone);background:var(--panel);
 border-radius:0 6px 6px 0;font-size:17px;line-height:1.5}
.verdict p{max-width:none}.verdict p:last-child{margin:0}.verdict .muted{font-size:14px}
.verdict b{color:var(--tone)}
.kept{--tone:var(--good)}.broken{--tone:var(--bad)}.open{--tone:var(--open)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(176px,1fr));gap:12px;margin:20px 0 8px}
.tile{border:1px solid var(--line);border-radius:6px;padding:12px 16px}
.tile span{display:block;font-size:13px;color:var(--muted)}
.tile b{display:block;font-size:22px;line-height:1.35;font-weight:600;font-variant-numeric:tabular-nums}
figure{margin:20px 0 28px}
figcaption{display:flex;flex-wrap:wrap;gap:2px 14px;align-items:baseline;margin:0 0 8px;font-size:14px}
figcaption .muted{font-size:13px}
.scroll{overflow-x:auto}
svg{display:block;width:100%;height:auto;font-family:inherit}
svg.wide{min-width:820px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:0 32px}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:8px 0 0 0;font-size:13px;color:var(--muted)}
.key{display:inline-flex;align-items:center;gap:7px;white-space:nowrap}
.swatch{width:12px;height:12px;border-radius:2px;flex:none}
i.tracked,i.resident,i.series,i.behind,i.budget,i.forecast{
 height:0;width:20px;border-radius:0;border-top:2px solid var(--ink)}
i.resident{border-top-style:dotted;border-top-width:3px}
i.series{border-top-color:var(--accent)}
i.behind{border-top:2px dashed var(--muted)}
i.budget{border-top:2px dashed var(--bad)}
i.forecast{border-top:2px dotted var(--ink)}
text{font-size:12px;fill:var(--ink)}
text.tick,text.note{font-size:11.5px}
text.tick{fill:var(--muted);font-variant-numeric:tabular-nums}
text.label{font-size:13px}
text.strong{font-weight:600}
text.end{text-anchor:end}
text.mid{text-anchor:middle}
text.note,text.halo-text{paint-order:stroke;stroke:var(--paper);stroke-width:4px;stroke-linejoin:round}
.axis{stroke:var(--muted);stroke-width:1}
.grid{stroke:var(--grid);stroke-width:1}
.lane{fill:var(--lane)}
line.budget{stroke:var(--bad);stroke-width:1.5;stroke-dasharray:6 4}
text.budget-text{fill:var(--bad);font-weight:600}
line.forecast{stroke:var(--ink);stroke-width:1;stroke-dasharray:1.5 3}
path.halo{fill:none;stroke:var(--paper);stroke-width:4;stroke-linejoin:round;opacity:.75}
path.tracked{fill:none;stroke:var(--ink);stroke-width:1.4}
path.resident{fill:none;stroke:var(--ink);stroke-width:2;stroke-dasharray:1 3;stroke-linecap:round}
path.series{fill:none;stroke:var(--accent);stroke-width:1.8;stroke-linejoin:round}
path.behind{fill:none;stroke:var(--muted);stroke-width:1.6;stroke-dasharray:5 4}
circle.bad{fill:var(--bad)}
.bars{display:grid;grid-template-columns:max-content max-content 1fr;gap:8px 16px;align-items:center;font-size:14px}
.bars b{text-align:right;font-weight:600;font-variant-numeric:tabular-nums}
.track{position:relative;height:20px}.track.head{grid-column:3;height:18px}
.bar{position:absolute;inset:0 auto 0 0;min-width:1px;border-radius:0 2px 2px 0}
.mark{position:absolute;top:-5px;bottom:-5px;border-left:2px dashed var(--bad)}
.flag{position:absolute;white-space:nowrap;color:var(--bad);font-size:12px;font-weight:600}
.flag.left{transform:translateX(-100%)}
.b-plain{background:var(--r-constant)}.b-predicted{background:var(--k-forward)}
.b-measured{background:var(--k-backward)}.b-over{background:var(--bad)}
rect[data-a]:hover,rect.twin{stroke:var(--ink);stroke-width:1.5}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th{font-weight:600;font-size:13px;color:var(--muted);border-bottom:1px solid var(--muted);vertical-align:bottom}
th,td{padding:7px 14px 7px 0;text-align:right;white-space:nowrap}
th.l,td.l{text-align:left}
td.wrap{white-space:pre-line;min-width:150px}
td.wrap,th.wrap{padding-left:20px}
td.name{white-space:normal;overflow-wrap:anywhere;min-width:180px}
td{border-bottom:1px solid var(--grid)}
tr.chosen td{background:var(--tint);font-weight:600}
tr.chosen td:first-child{box-shadow:inset 3px 0 var(--accent)}
td:first-child,th:first-child{padding-left:10px}
tr.total td{border-top:1px solid var(--muted);font-weight:600}
td .swatch{display:inline-block;margin-right:8px;vertical-align:-1px}
td.no{color:var(--bad)}
.under{margin-top:10px;font-size:14px;color:var(--muted)}
ul{margin:0;padding-left:20px;max-width:90ch}li{margin:0 0 5px;overflow-wrap:anywhere}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 24px;margin:0;font-size:14px}
dt{color:var(--muted)}dd{margin:0;overflow-wrap:anywhere}
code,pre{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
pre{background:var(--panel);border-radius:6px;padding:12px 16px;white-space:pre-wrap;overflow-wrap:anywhere}
#tip{position:fixed;z-index:9;pointer-events:none;display:none;max-width:420px;padding:9px 12px;border-radius:6px;
 background:var(--ink);color:var(--paper);font-size:13px;line-height:1.45;white-space:pre-line;overflow-wrap:anywhere}
.timed{position:relative}
.cursor{position:absolute;top:0;bottom:0;width:1px;background:var(--ink);opacity:.35;pointer-events:none;display:none}
footer{margin-top:56px;font-size:13px;color:var(--muted)}
@media (max-width:640px){.bars{grid-template-columns:1fr max-content;gap:2px 12px}.track{grid-column:1/-1;height:16px;
 margin-bottom:8px}.track.head{grid-column:1/-1;margin:0}
 main{padding:28px 16px 64px}h2{margin-top:40px}dl{grid-template-columns:1fr;gap:0 0}
 dd{margin-bottom:8px}}
@media print{main{padding:0;max-width:none}figure,tr,.tile,.verdict{break-inside:avoid}h2,h2+p{break-after:avoid}
 .charts{grid-template-columns:1fr 1fr}
 h2{margin-top:28px}.scroll{overflow:visible}svg.wide{min-width:0}th,td{padding-right:8px}table{font-size:12px}
 *{print-color-adjust:exact;-webkit-print-color-adjust:exact}#tip,.cursor{display:none!important}}
"""

#: Follows the viewer's setting on screens, is light on paper; ``data-theme`` on the root element overrules it.
CSS = (
    f":root{{{_LIGHT}}}"
    f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{_DARK}}}}}"
    f"@media screen{{:root[data-theme=dark]{{color-scheme:dark;{_DARK}}}}}"
    + _RULES
    + "".join(f"path.{c},rect.{c}{{fill:var(--{c})}}.swatch.{c}{{background:var(--{c})}}" for c in _COLOURED)
)  # fmt: skip

#: Tooltips of the timeline, its twin slices, and one time cursor over all charts that share the axis.
SCRIPT = """
(() => {
  const data = JSON.parse(document.getElementById("actions").textContent);
  const tip = document.getElementById("tip");
  const time = s => s == null ? "not run" : s >= 1 ? s.toFixed(3) + " s" : s >= 1e-3 ? (s * 1e3).toFixed(2) + " ms"
    : (s * 1e6).toFixed(1) + " us";
  const describe = rect => {
    const id = rect.dataset.a, [label, ...seconds] = data.actions[id], lines = [];
    const {n, s} = rect.dataset;
    if (n) lines.push(n + " short actions, " + time(+s) + " in all; the longest:");
    lines.push(label, "action " + id);
    data.sources.forEach((source, i) => lines.push(source + " " + time(seconds[i])));
    if (seconds.length > 1 && seconds[0] && seconds[1])
      lines.push("predicted / measured " + (seconds[0] / seconds[1]).toFixed(2));
    return lines.join("\\n");
  };
  const show = event => {
    document.querySelectorAll("rect.twin").forEach(rect => rect.classList.remove("twin"));
    const rect = event.target.closest && event.target.closest("rect[data-a]");
    tip.style.display = rect ? "block" : "none";
    if (!rect) return;
    document.querySelectorAll('rect[data-a="' + rect.dataset.a + '"]').forEach(twin => twin.classList.add("twin"));
    tip.textContent = describe(rect);
    const x = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    const below = event.clientY + 18 + tip.offsetHeight < innerHeight;
    tip.style.left = Math.max(8, x) + "px";
    tip.style.top = (below ? event.clientY + 18 : event.clientY - 12 - tip.offsetHeight) + "px";
  };
  document.addEventListener("mousemove", show);
  document.addEventListener("click", show);
  const timed = [...document.querySelectorAll(".timed")];
  const cursors = timed.map(box => {
    const cursor = document.createElement("div");
    cursor.className = "cursor";
    box.append(cursor);
    return cursor;
  });
  timed.forEach(box => {
    box.addEventListener("mousemove", event => {
      const x = event.clientX - box.getBoundingClientRect().left;
      cursors.forEach(cursor => { cursor.style.display = "block"; cursor.style.left = x + "px"; });
    });
    box.addEventListener("mouseleave", () => cursors.forEach(cursor => { cursor.style.display = "none"; }));
  });
})();
"""
