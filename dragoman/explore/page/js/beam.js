// The beam search as a tree: columns are steps, kept hypotheses solid, dropped ones hollow, the winner heavy.
// Lines and dots are drawn on a canvas of the window's size; names of nodes in view are real tree items over it.
import { make, setAttributes, setChildren } from './dom.js';
import { addTexts, formatNumber, formatScore, translate } from './i18n.js';
import { paintLater } from './draw.js';
import { clamp, fillGroup, formatLogprob, hasModifier, revealRange, sentence } from './parts.js';
import { onTheme, themeColor } from './theme.js';
import { explainCommand, shellQuote } from './strip.js';
import { scrollRegion } from './table.js';
import { quoted, shortened } from './text.js';

const beamText = addTexts('beam', {
  title: ['Beam search', '束搜索'],
  purpose: ['Every hypothesis that the search tried, from left to right, and why each of the others lost.', '搜索从左到右试过的每个假设，以及其他假设为什么落选。'],
  tree: ['Tree', '树'],
  list: ['List', '列表'],
  table: ['Table', '表格'],
  shapes: ['View of the search', '搜索的显示方式'],
  winner: ['the translation', '译文'],
  kept: ['kept in the beam', '留在束中'],
  dropped: ['dropped', '被舍弃'],
  count: ['{nodes} candidates in {steps} steps, beam {width}', '{steps} 步中有 {nodes} 个候选，束宽 {width}'],
  left: [' ({count} of the worst are not shown)', '（另有 {count} 个最差的未显示）'],
  runner: ['{other} lost with {score} against {best}. They part at step {step}: the translation continues with {ours} ({p}), the other with {theirs} ({q}).', '{other} 以 {score} 输给 {best}。两者在第 {step} 步分开：译文接着写 {ours}（{p}），另一个写 {theirs}（{q}）。'],
  only: ['The search finished only one hypothesis.', '搜索只完成了一个假设。'],
  finished: ['Finished hypotheses', '完成的假设'],
  finishedHint: ['Scores are log-probabilities under the length penalty; the highest wins.', '得分是经长度惩罚的对数概率，最高者胜出。'],
  text: ['Hypothesis', '假设'],
  score: ['Score', '得分'],
  sum: ['Sum', '总和'],
  steps: ['Step', '步'],
  outcome: ['Outcome', '结果'],
  page: ['Candidates {from} to {to} of {count}', '第 {from} 至 {to} 个候选，共 {count} 个'],
  earlier: ['Earlier', '前面'],
  later: ['Later', '后面'],
  node: ['step {step}, {token}, probability {p}, {reason}', '第 {step} 步，{token}，概率 {p}，{reason}'],
  root: ['start', '开始'],
  stop: ['.', '。'],
  step: ['Step {step}', '第 {step} 步'],
  after: ['after {text}', '接在 {text} 之后'],
  continue: ['Continue from here', '从这里继续'],
  continueHint: ['Force this beginning and let the model finish it.', '固定这个开头，让模型写完。'],
  continueFile: ['To continue from here, run:', '要从这里继续，请运行：'],
});
addTexts('reason', {
  winner: ['kept: part of the translation', '保留：译文的一部分'],
  kept: ['kept: among the {width} best of this step', '保留：这一步最好的 {width} 个之一'],
  beam_full: ['dropped: its score {cum} is {short} short of {cut}, the last in the beam', '舍弃：得分 {cum}，比束中最后一个的 {cut} 少 {short}'],
  finished: ['finished: number {rank}, with score {normalised}', '完成：第 {rank} 名，得分 {normalised}'],
  worse_finished: ['finished, but not among the best, of at least {cut}', '已完成，但不在最好之列，它们都不低于 {cut}'],
  length_cap: ['dropped: not ended at the maximum length', '舍弃：到了最大长度还没结束'],
  no_repeat: ['forbidden: it would repeat an n-gram', '禁止：会重复一个 n 元组'],
  constraint: ['forbidden: by a constraint or the forced beginning', '禁止：由于约束或固定的开头'],
  duplicate: ['dropped: the text of another hypothesis', '舍弃：与另一个假设文字相同'],
  early_stop: ['dropped: it could reach {cut} at best, not enough', '舍弃：最多只能达到 {cut}，进不了最好之列'],
});

const BEAM_ROW = 26;
const BEAM_COLUMN = 112;
const BEAM_LIST_ROW = 30;
const BEAM_PAGE = 100;
const BEAM_MARGIN = 18;

// Close the gaps that the tree layout leaves in a column, keeping its order, with the winner of every column level.
function beamPack(columns, y, winner) {
  const [top, bottom] = [[0], [0]];
  for (const column of columns) {
    column.sort((a, b) => y[a] - y[b]);
    const packed = [0];
    for (let i = 1; i < column.length; i++) packed[i] = packed[i - 1] + Math.min(y[column[i]] - y[column[i - 1]], 1.5 * BEAM_ROW);
    const level = packed[column.findIndex((node) => winner.has(node))] ?? packed.at(-1) / 2;
    column.forEach((node, i) => {
      y[node] = packed[i] - level;
    });
    top.push(-level);
    bottom.push(packed.at(-1) - level);
  }
  return [Math.min(...top), Math.max(...bottom)];
}

// The nodes with what the drawing needs: children best first, the winner's path, positions by d3's tree layout.
export function buildBeam(ex) {
  ex.tree ??= ex.beam && beamTree(ex);
  return ex.tree;
}

function beamTree(ex) {
  const { width, reasons, nodes } = ex.beam;
  const fields = Object.fromEntries(Object.entries(nodes).map(([name, tensor]) => [name, ex.tensor(tensor).data]));
  const { parent, token, cum, step, reason, cut } = fields;
  const count = parent.length;
  const children = Array.from({ length: count }, () => []);
  for (let i = 1; i < count; i++) children[parent[i]].push(i);
  const listed = ex.nbest.filter((entry) => entry.leaf !== null);
  const leaves = listed.map((entry) => entry.leaf);
  const path = (node) => (node > 0 ? [...path(parent[node]), node] : []);
  const winner = new Set([0, ...path(leaves[0])]);
  for (const list of children) list.sort((a, b) => winner.has(b) - winner.has(a) || cum[b] - cum[a]);
  // The best child stands in the middle of its siblings, so the winner's path runs level.
  const spread = (list) => [...list.filter((_, i) => i % 2).reverse(), ...list.filter((_, i) => i % 2 === 0)];
  const root = globalThis.d3.hierarchy(0, (node) => spread(children[node]));
  globalThis.d3.tree().nodeSize([BEAM_ROW, BEAM_COLUMN]).separation(() => 1)(root);
  const x = new Float32Array(count);
  const y = new Float32Array(count);
  root.each((point) => {
    x[point.data] = point.y + BEAM_MARGIN;
    y[point.data] = point.x;
  });
  const steps = step.reduce((most, each) => Math.max(most, each), 0) + 1;
  const columns = Array.from({ length: steps + 1 }, () => []);
  for (let i = 0; i < count; i++) columns[step[i] + 1].push(i);
  const [top, bottom] = beamPack(columns, y, winner);
  for (let i = 0; i < count; i++) y[i] += BEAM_MARGIN - top;
  const extent = [(steps + 1) * BEAM_COLUMN + BEAM_MARGIN, bottom - top + 2 * BEAM_MARGIN];

  const text = (way) => way.map((node) => ex.token_texts[token[node]] ?? '').join('').trim();

  // The n-best list, then the other hypotheses that ended, best first: {leaf, text, sum, normalised or null}.
  function finished() {
    const [best] = listed;
    // Only the GNMT penalty can be computed from the length; it must give the score that the search reported.
    const alpha = Number(/^gnmt ([\d.]+)$/.exec(ex.score.penalty)?.[1]);
    const normalise = (node) => cum[node] / ((6 + step[node]) / 6) ** alpha;
    const known = best && Math.abs(normalise(best.leaf) - best.normalised) < 1e-3;
    const name = reasons.indexOf('worse_finished');
    const others = [...reason.keys()].filter((node) => node && reason[node] === name).map((leaf) => (
      { leaf, text: text(path(parent[leaf])), sum: cum[leaf], normalised: known ? normalise(leaf) : null }));
    others.sort((a, b) => (b.normalised ?? b.sum) - (a.normalised ?? a.sum));
    return [...listed, ...others];
  }

  return {
    ...fields, count, children, winner, leaves, x, y, columns, steps, width, extent, path, text, finished,
    label: (node) => (node ? (ex.token_texts[token[node]] ?? `#${token[node]}`).trim() || '␣' : beamText('root')),
    // How a node is drawn: whether it is part of the translation, or the search kept it, or ended with it among its best.
    kind(node) {
      if (winner.has(node)) return 'winner';
      return ['kept', 'finished'].includes(reasons[reason[node]]) ? 'kept' : 'dropped';
    },
    // Why the node was kept or dropped, in words, from the scores of the search.
    why(node) {
      const rank = leaves.indexOf(node);
      let name = reasons[reason[node]];
      if (name === 'kept' && winner.has(node)) name = 'winner';
      if (['beam_full', 'worse_finished', 'early_stop'].includes(name) && Number.isNaN(cut[node])) return beamText('dropped');
      return translate(`reason.${name}`, {
        width,
        rank: rank + 1,
        normalised: formatScore(listed[rank]?.normalised),
        cum: formatNumber(cum[node]),
        cut: (name === 'beam_full' ? formatNumber : formatScore)(cut[node]),
        short: formatNumber(cut[node] - cum[node]),
      });
    },
  };
}

// The scores of the translation and of another hypothesis: normalised where both are known so.
export function beamScores(best, other) {
  const key = other.normalised === null ? 'sum' : 'normalised';
  return { best: formatScore(best[key]), score: formatScore(other[key]) };
}

export function mountBeam(body, { store, api, current, onExplanation, announce, wait, replace, visit, fail }) {
  const answer = make('p.answer');
  const shapes = make('div.segments');
  const note = make('p.quiet');
  const stage = make('div.beam-stage');
  const detail = make('div.beam-detail');
  const nbest = make('div.beam-nbest');
  let ex = null;
  let beam = null;
  let finished = [];
  let shape = 'tree';

  const chance = (node) => formatLogprob(beam.logprob[node]);

  // The node that is selected, or the translation's node at the selected step.
  function active() {
    const { node, step } = store.get();
    return node ?? [...beam.winner].find((each) => beam.step[each] === step) ?? 0;
  }

  // Whether the node was known at the selected step, while stepping through decoding.
  function isKnown(node) {
    const { time, step } = store.get();
    return !time || beam.step[node] <= (step ?? 0);
  }

  function select(node) {
    const onWay = node > 0 && beam.winner.has(node) && beam.step[node] < ex.steps.length;
    store.set({ node, ...(onWay && { step: beam.step[node] }) });
    announce(name(node));
  }

  function name(node) {
    if (node === 0) return beam.label(0);
    return beamText('node', { step: beam.step[node] + 1, token: beam.label(node), p: chance(node), reason: beam.why(node) });
  }

  // A table with a row, [node, ...cells], for each node; the second cell is the row's header and selects the node.
  function nodeTable(id, titles, rows) {
    const style = (i) => ({ class: { 'beam.sum': id && 'optional', 'beam.outcome': 'why' }[titles[i]] });
    const cell = (content, i, onclick) => (i === 1
      ? make('th', { scope: 'row' }, make('button.plain.text', { onclick }, make('bdi', { lang: ex.target.lang }, content)))
      : make('td', style(i), content));
    return make('table.data', { 'aria-labelledby': id },
      make('thead', make('tr', titles.map((key, i) => make('th', { scope: 'col', ...style(i) }, translate(key))))),
      make('tbody', rows.map(([node, ...cells]) =>
        make('tr', { 'data-row': node }, cells.map((content, i) => cell(content, i, () => select(node)))))));
  }

  // A scrolling tree with one tab stop. `moves(node)` maps keys to the node that they lead to, or to a function.
  function treeBox(kind, content, moves) {
    return make(kind, {
      role: 'tree',
      tabindex: 0,
      'data-widget': 'beam',
      onclick: ({ target }) => {
        const item = target.closest('[role="treeitem"]');
        if (item) (target.closest('.twist') ? toggle : select)(Number(item.dataset.node));
      },
      onkeydown: (event) => {
        const node = active();
        const targets = { Home: 0, Enter: node, ' ': node, ...moves(node) };
        if (hasModifier(event) || !(event.key in targets)) return;
        event.preventDefault();
        const next = targets[event.key];
        if (typeof next === 'function') next();
        else if (next >= 0 && isKnown(next)) select(next);
      },
    }, content);
  }

  function itemAttributes(node, isOpen) {
    const siblings = node ? beam.children[beam.parent[node]] : [0];
    return {
      id: `beam-node-${node}`,
      'data-node': node,
      'aria-label': name(node),
      'aria-level': beam.step[node] + 2,
      'aria-setsize': siblings.length,
      'aria-posinset': siblings.indexOf(node) + 1,
      'aria-expanded': beam.children[node].length ? isOpen : null,
    };
  }

  // The drawing: a canvas of the window's size under tree items for the nodes in view.
  const canvas = make('canvas', { 'aria-hidden': true });
  const items = make('div.beam-items', { role: 'presentation' });
  const space = make('div.beam-space', { role: 'presentation' }, canvas, items);
  const legend = make('p.legend');
  const treeScroller = treeBox('div.beam-scroller', space, (node) => {
    const column = beam.columns[beam.step[node] + 1];
    const at = column.indexOf(node);
    return {
      ArrowRight: beam.children[node][0],
      ArrowLeft: beam.parent[node],
      ArrowDown: column[at + 1],
      ArrowUp: column[at - 1],
      End: beam.leaves[0],
    };
  });
  const widths = new Map(); // of names
  treeScroller.addEventListener('scroll', draw);
  new ResizeObserver(draw).observe(treeScroller);

  function buildTree() {
    const [wide, high] = beam.extent;
    Object.assign(space.style, { width: `${wide}px`, height: `${high}px` });
    treeScroller.style.height = `${Math.min(high + 26, 420)}px`;
    setChildren(legend, ['winner', 'kept', 'dropped'].map((kind) => make(`span.key.beam-${kind}`, beamText(kind))));
    setChildren(items);
    treeScroller.scrollTop = beam.y[active()] - treeScroller.clientHeight / 2;
  }

  function reveal() {
    if (!beam) return;
    const [x, y] = [beam.x[active()], beam.y[active()]];
    revealRange(treeScroller, 'scrollLeft', 'clientWidth', x - BEAM_COLUMN, x + 2 * BEAM_COLUMN);
    revealRange(treeScroller, 'scrollTop', 'clientHeight', y - BEAM_ROW, y + 2 * BEAM_ROW);
  }

  function updateTree(moved) {
    if (moved) paintLater(reveal);
    paintLater(draw);
  }

  function draw() {
    const { clientWidth: wide, clientHeight: high, scrollLeft: left, scrollTop: top } = treeScroller;
    if (!beam || !wide) return;
    const ratio = devicePixelRatio;
    [canvas.width, canvas.height] = [wide, high].map((length) => Math.round(length * ratio));
    Object.assign(canvas.style, { width: `${wide}px`, height: `${high}px` });
    const context = canvas.getContext('2d');
    context.setTransform(ratio, 0, 0, ratio, -left * ratio, -top * ratio);
    context.font = `15px ${getComputedStyle(treeScroller).getPropertyValue('--serif')}`;
    const [accent, soft, edge, ink, panel] = ['draw-accent', 'accent-soft', 'draw-edge', 'draw-ink', 'draw-panel'].map(themeColor);
    const stroke = (color, width) => {
      context.strokeStyle = color;
      context.lineWidth = width;
      context.stroke();
    };
    const circle = (node, radius) => {
      context.beginPath();
      context.arc(beam.x[node], beam.y[node], radius, 0, 2 * Math.PI);
    };
    const first = Math.max(0, Math.floor((left - BEAM_MARGIN) / BEAM_COLUMN) - 1);
    const nodes = beam.columns.slice(first, Math.ceil((left + wide) / BEAM_COLUMN) + 2).flat().filter(isKnown);
    const { step } = store.get();
    if (step !== null) {
      context.fillStyle = soft;
      context.globalAlpha = 0.45;
      context.fillRect(BEAM_MARGIN + (step + 1) * BEAM_COLUMN - 12, top, BEAM_COLUMN - 4, high);
      context.globalAlpha = 1;
    }
    const isAbove = (node) => beam.y[node] < top - BEAM_ROW;
    const isBelow = (node) => beam.y[node] > top + high + BEAM_ROW;
    const end = (node) => {
      const text = beam.label(node);
      if (!widths.has(text)) widths.set(text, context.measureText(text).width);
      return beam.x[node] + 10 + Math.min(BEAM_COLUMN - 34, widths.get(text));
    };
    const colors = { dropped: edge, kept: ink, winner: accent };
    for (const [kind, color] of Object.entries(colors)) {
      context.beginPath();
      for (const node of nodes) {
        const parent = beam.parent[node];
        const unseen = (isAbove(node) && isAbove(parent)) || (isBelow(node) && isBelow(parent));
        if (node === 0 || unseen || beam.kind(node) !== kind) continue;
        const [x0, y0, x1, y1] = [end(parent), beam.y[parent], beam.x[node] - 5, beam.y[node]];
        const bend = Math.max(12, (x1 - x0) / 2);
        context.moveTo(x0, y0);
        context.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
      }
      context.setLineDash(kind === 'dropped' ? [3, 3] : []);
      stroke(color, kind === 'winner' ? 3 : 1);
    }
    const chosen = active();
    const path = new Set(beam.path(chosen));
    const shown = nodes.filter((node) => !isAbove(node) && !isBelow(node));
    for (const node of shown) {
      const kind = beam.kind(node);
      circle(node, kind === 'winner' ? 5 : 4);
      context.fillStyle = kind === 'dropped' ? panel : colors[kind];
      context.fill();
      stroke(colors[kind], 1.5);
      if (path.has(node)) {
        circle(node, 8);
        stroke(accent, node === chosen ? 2 : 1);
      }
    }
    if (!shown.includes(chosen) && isKnown(chosen)) shown.push(chosen);
    place(shown, chosen);
  }

  // Tree items for the nodes in view, the elements of nodes that left it used again.
  function place(nodes, chosen) {
    const placed = new Map([...items.children].map((item) => [Number(item.dataset.node), item]));
    const free = [...placed].filter(([node]) => !nodes.includes(node)).map(([, item]) => item);
    for (const node of nodes) {
      let item = placed.get(node);
      if (!item) {
        item = free.pop() ?? items.appendChild(make('div', { role: 'treeitem' }, make('bdi', { lang: ex.target.lang })));
        item.firstChild.textContent = beam.label(node);
        setAttributes(item, { ...itemAttributes(node, true), class: beam.winner.has(node) ? 'winner' : null });
        item.style.transform = `translate(${beam.x[node] - 9}px, ${beam.y[node] - BEAM_ROW / 2}px)`;
      }
      item.ariaSelected = node === chosen;
    }
    for (const item of free) item.remove();
    treeScroller.setAttribute('aria-activedescendant', `beam-node-${chosen}`);
  }

  // The same nodes as an indented list; only the rows in view are in the document.
  const listSpace = make('div.beam-space', { role: 'presentation' });
  const listScroller = treeBox('div.beam-scroller.beam-list', listSpace, (node) => {
    const at = rows.indexOf(node);
    const isOpen = opened.has(node) && beam.children[node].length > 0;
    return {
      ArrowDown: rows[at + 1],
      ArrowUp: rows[at - 1],
      End: rows.at(-1),
      ArrowRight: isOpen ? beam.children[node][0] : () => toggle(node),
      ArrowLeft: isOpen ? () => toggle(node) : beam.parent[node],
    };
  });
  let opened = new Set();
  let rows = [];
  listScroller.addEventListener('scroll', drawList);

  function flatten(node) {
    return isKnown(node) ? [node, ...(opened.has(node) ? beam.children[node].flatMap(flatten) : [])] : [];
  }

  function showRows() {
    rows = flatten(0);
    listSpace.style.height = `${rows.length * BEAM_LIST_ROW}px`;
    drawList();
  }

  function toggle(node) {
    if (!opened.delete(node)) opened.add(node);
    showRows();
  }

  function updateList() {
    for (const node of [0, ...beam.path(beam.parent[active()])]) opened.add(node);
    showRows();
    const at = rows.indexOf(active()) * BEAM_LIST_ROW;
    revealRange(listScroller, 'scrollTop', 'clientHeight', at, at + BEAM_LIST_ROW);
    drawList();
  }

  function drawList() {
    if (!beam) return;
    const chosen = active();
    const from = Math.max(0, Math.floor(listScroller.scrollTop / BEAM_LIST_ROW) - 4);
    const shown = rows.slice(from, from + Math.ceil((listScroller.clientHeight || 420) / BEAM_LIST_ROW) + 8);
    setChildren(listSpace, shown.map((node, i) => {
      const attributes = itemAttributes(node, opened.has(node));
      const row = make(`div.${beam.kind(node)}`, {
        ...attributes,
        role: 'treeitem',
        'aria-selected': node === chosen,
        var: { level: Math.min(beam.step[node] + 1, 12) },
      },
      make('span.twist', { 'aria-hidden': true }, { true: '▾', false: '▸' }[attributes['aria-expanded']]),
      make('span.dot', { 'aria-hidden': true }),
      make('bdi', { lang: ex.target.lang }, beam.label(node)),
      make('span.number', node > 0 && chance(node)),
      make('span.why', node > 0 && beam.why(node)));
      row.style.top = `${(from + i) * BEAM_LIST_ROW}px`;
      return row;
    }));
    setAttributes(listScroller, { 'aria-activedescendant': shown.includes(chosen) ? `beam-node-${chosen}` : null });
  }

  // The same nodes as a table, a hundred rows at a time.
  const tableBox = make('div.beam-table');
  let page = 0;

  function updateTable() {
    const nodes = [...beam.parent.keys()].filter((node) => node && isKnown(node));
    page = clamp(page, 0, Math.ceil(nodes.length / BEAM_PAGE) - 1);
    const from = page * BEAM_PAGE;
    const part = nodes.slice(from, from + BEAM_PAGE);
    const turn = (by, key, disabled) => make('button', {
      disabled,
      onclick: () => {
        page += by;
        update();
      },
    }, translate(key));
    setChildren(tableBox,
      scrollRegion(beamText('table'),
        nodeTable(null, ['beam.steps', 'nav.token', 'strip.probability', 'beam.sum', 'beam.outcome'], part.map((node) =>
          [node, beam.step[node] + 1, beam.label(node), chance(node), formatNumber(beam.cum[node]), beam.why(node)]))),
      make('div.row',
        turn(-1, 'beam.earlier', page === 0),
        make('span.quiet', beamText('page', { from: from + 1, to: from + part.length, count: nodes.length })),
        turn(1, 'beam.later', from + BEAM_PAGE >= nodes.length)),
    );
  }

  const views = {
    tree: [make('div', treeScroller, legend), updateTree],
    list: [listScroller, updateList],
    table: [tableBox, updateTable],
  };

  function show() {
    const choose = (each) => () => {
      shape = each;
      show();
    };
    fillGroup(shapes, beamText('shapes'), Object.keys(views).map((each) =>
      [beamText(each), { 'aria-pressed': each === shape, onclick: choose(each) }]));
    setChildren(stage, views[shape][0]);
    opened = new Set(beam.winner);
    page = 0;
    buildTree();
    update(true);
  }

  function update(moved) {
    views[shape][1](moved);
    showDetail();
    for (const row of body.querySelectorAll('[data-row]')) row.classList.toggle('selected', Number(row.dataset.row) === active());
  }

  function build() {
    beam = buildBeam(ex);
    setChildren(stage);
    if (!beam) return;
    for (const box of [treeScroller, listScroller]) box.ariaLabel = beamText('title');
    const { dropped } = ex.beam;
    note.textContent = beamText('count', { nodes: beam.count - 1, steps: beam.steps, width: beam.width })
      + (dropped ? beamText('left', { count: dropped }) : '');
    finished = beam.finished();
    showAnswer();
    showFinished();
    show();
  }

  // Where the runner-up and the translation part.
  function showAnswer() {
    const [best, other] = finished;
    answer.textContent = best && !other ? beamText('only') : '';
    if (!other) return;
    const ways = [best, other].map(({ leaf }) => beam.path(leaf));
    const at = ways[0].findIndex((node, i) => node !== ways[1][i]);
    const [ours, theirs] = ways.map((way) => way[at]);
    const said = (text) => quoted(text, ex.target.lang);
    setChildren(answer, sentence('beam.runner', {
      ...beamScores(best, other),
      other: said(shortened(other.text)),
      step: at + 1,
      ours: said(beam.label(ours)),
      theirs: said(beam.label(theirs)),
      p: chance(ours),
      q: chance(theirs),
    }));
  }

  function showFinished() {
    nbest.hidden = !finished.length;
    setChildren(nbest,
      make('h3', { id: 'beam-finished' }, beamText('finished')),
      nodeTable('beam-finished', ['strip.rank', 'beam.text', 'beam.score', 'beam.sum'], finished.slice(0, 8).map(
        ({ leaf, text, normalised, sum }, rank) => [leaf, rank + 1, text, formatScore(normalised), formatNumber(sum)])),
      make('p.quiet', beamText('finishedHint')),
    );
  }

  function showDetail() {
    const node = active();
    setChildren(detail);
    if (node === 0) return;
    const { lang } = ex.target;
    const way = beam.path(node);
    const before = way.slice(0, -1);
    const text = (before.length > 12 ? '… ' : '') + beam.text(before.slice(-12));
    const reason = beam.why(node);
    detail.append(
      make('h3', `${beamText('step', { step: beam.step[node] + 1 })} · `, quoted(beam.label(node), lang)),
      make('p.answer', { id: 'beam-reason' }, `${reason[0].toLocaleUpperCase()}${reason.slice(1)}${beamText('stop')}`),
      make('p.quiet', text && [...sentence('beam.after', { text: quoted(text, lang) }), ' · '],
        `${translate('strip.probability')} ${chance(node)} · ${beamText('sum')} ${formatNumber(beam.cum[node])}`),
    );
    const isEnd = ex.target.tokens.some(({ special, id }) => special && id === beam.token[node]);
    if (beam.winner.has(node) || isEnd) return;
    if (api) {
      detail.append(make('div.row',
        make('button', { onclick: () => resume(way.map((each) => beam.token[each])) }, beamText('continue')),
        make('span.quiet', beamText('continueHint'))));
    } else {
      detail.append(make('p.quiet', beamText('continueFile')),
        make('code.command', { tabindex: 0 }, explainCommand(ex, ['--prefix', shellQuote(beam.text(way))])));
    }
  }

  // Translate again with the tokens up to a node forced.
  async function resume(ids) {
    const { beam: width, length_penalty: penalty } = ex.request;
    try {
      const next = await wait(api.explain({ text: ex.source.text, beam: width, length_penalty: penalty, prefix_ids: ids }));
      store.set({ node: null });
      replace(next);
      visit('strip');
    } catch (error) {
      fail(error);
    }
  }

  body.append(answer, make('div.row.beam-bar', shapes, note), stage, make('div.beam-below', detail, nbest));
  onExplanation((shown) => {
    ex = shown;
    build();
  });
  store.subscribe((state, changed) => {
    if (!beam || current() !== ex) return;
    const moved = changed.has('node') || changed.has('step');
    if (moved || changed.has('time')) update(moved);
  });
  onTheme(() => shape === 'tree' && draw());
}
