"""Style and script of the page. Colours come in two sets, by what the reader's system prefers."""

STYLE = """
:root { color-scheme: light dark;
  --text: #1c2024; --soft: #545b63; --page: #fbfbf9; --card: #ffffff; --line: #dfe1dd;
  --kept: #a9b1b9; --moved: #2f6fd0; --recomputed: #d2691e; --without: #8a3b0a; --before: #70767d;
  --removed: #b3261e; --removed-back: #fde7e5; --replaced: #6b3fa0; --replaced-back: #efe6fa; }
@media (prefers-color-scheme: dark) { :root {
  --text: #e6e8ea; --soft: #a3abb3; --page: #15181b; --card: #1d2125; --line: #343a40;
  --kept: #59626b; --moved: #6ea2f2; --recomputed: #ee9a55; --without: #f5c08f; --before: #8b939b;
  --removed: #ff9d94; --removed-back: #43211f; --replaced: #c9a6f5; --replaced-back: #33264a; } }
body { color: var(--text); background: var(--page); font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif;
  max-width: 1020px; margin: 0 auto; padding: 32px 24px 64px; }
h1, p { overflow-wrap: anywhere; } h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .4em; }
h2 { font-size: 1.1rem; margin: 2.2em 0 .6em; }
.soft { color: var(--soft); } p { max-width: 90ch; margin: 0 0 .8em; }
pre:empty { display: none; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 12.5px/1.45 ui-monospace, "DejaVu Sans Mono", monospace;
  margin: 0; max-height: 22em; overflow: auto; }
figure, article, .cards div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
figure { margin: 0; padding: 12px 14px 6px; overflow-x: auto; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 12px; margin: 18px 0; }
.cards div { padding: 12px 16px; } .cards b { display: block; font-size: 1.5rem; font-variant-numeric: tabular-nums; }
.chart { display: block; width: 100%; min-width: 640px; height: auto; }
.chart text { font-size: 11.5px; fill: var(--soft); }
.chart .grid { stroke: var(--line); } .chart .hover { fill: transparent; cursor: pointer; }
.chart .hover:hover, .chart .now .hover { fill: var(--text); fill-opacity: .09; }
.chart rect.kept, i.kept { fill: var(--kept); background: var(--kept); }
.chart rect.moved, i.moved { fill: var(--moved); background: var(--moved); }
.chart rect.recomputed, i.recomputed { fill: var(--recomputed); background: var(--recomputed); }
.chart polyline { fill: none; stroke-width: 1.8; } .chart .edit { fill: var(--replaced); }
.chart .before { stroke: var(--before); stroke-dasharray: 2 4; } i.before { background: var(--before); }
.chart .without { stroke: var(--without); stroke-dasharray: 6 4; } i.without { background: var(--without); }
i.removed { background: var(--removed); } i.replaced { background: var(--replaced); }
.legend { font-size: .87rem; margin: 8px 0; } .legend span { margin-right: 16px; white-space: nowrap; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 5px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th, td { padding: 4px 10px; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top;
  font-variant-numeric: tabular-nums; }
th:last-child, td:last-child { text-align: left; } td p { margin: 0; max-width: none; }
.picker { position: sticky; top: 0; background: var(--page); padding: 8px 0; display: flex; gap: 10px; flex-wrap: wrap;
  align-items: center; border-bottom: 1px solid var(--line); z-index: 1; } .picker input { flex: 1; min-width: 160px; }
article { border-left: 6px solid var(--kept); margin: 8px 0; padding: 8px 14px; }
article[hidden] { display: none; }
article header { display: flex; gap: 0 10px; flex-wrap: wrap; font-size: .85rem; color: var(--soft); }
article header b { color: var(--text); } .state { font-weight: 600; }
article.moved { border-left-color: var(--moved); } article.moved .state { color: var(--moved); }
article.recomputed { border-left-color: var(--recomputed); } article.recomputed .state { color: var(--recomputed); }
article.removed { border-left-color: var(--removed); border-left-style: dashed; }
article.removed .state { color: var(--removed); }
del { color: var(--removed); background: var(--removed-back); } ins { color: var(--replaced); text-decoration: none;
  background: var(--replaced-back); } del, ins { border-radius: 3px; }
summary { cursor: pointer; color: var(--removed); font-size: .85rem; }
"""

# Shows one turn, `#turn=7` in the address a certain one: each message says in `data-states`, a letter a turn, what
# becomes of it.
SCRIPT = """
const names = {k: "kept", m: "moved", r: "recomputed", x: "removed"};
const slider = document.getElementById("turn");
function show(turn) {
  slider.value = turn;
  document.getElementById("turn-number").textContent = turn;
  for (const card of document.querySelectorAll("article")) {
    const state = names[card.dataset.states[turn - 1]];
    card.hidden = !state;
    card.className = state || "";
    if (state) card.querySelector(".state").textContent = state;
  }
  for (const bar of document.querySelectorAll(".bar")) bar.classList.toggle("now", bar.dataset.turn == turn);
}
slider.addEventListener("input", () => show(slider.value));
for (const bar of document.querySelectorAll(".bar")) bar.addEventListener("click", () => show(bar.dataset.turn));
const asked = location.hash.match(/^#turn=([0-9]+)$/);
if (slider.max >= 1) show(asked ? Math.min(Math.max(asked[1], 1), slider.max) : slider.value);
"""
