// The beam search as a tree: columns are steps, kept hypotheses solid, dropped ones hollow, the winner heavy.
// Lines and dots are drawn on a canvas of the window's size; names of nodes in view are real tree items over it.
import { addStrings, formatNumber, formatProbability, formatScore, translate } from './i18n.js';
import { decodeExplanation } from './data.js';
import { element, setAttributes } from './dom.js';
import { paintLater } from './draw.js';
import { onTheme, themeColor } from './theme.js';
import { explainCommand, shellQuote } from './strip.js';
import { fill, quoted } from './text.js';

addStrings(
  {
    'beam.shape.tree': 'Tree',
    'beam.shape.list': 'List',
    'beam.shape.table': 'Table',
    'beam.shapes': 'How to show the search',
    'beam.legend.winner': 'the translation',
    'beam.legend.kept': 'kept in the beam',
    'beam.legend.dropped': 'dropped',
    'beam.count': '{nodes} candidates in {steps} steps, beam {width}',
    'beam.left': ' ({count} of the worst are not shown)',
    'beam.runner': '{other} lost with {score} against {best}. The two part at step {step}: the translation continues with {ours} ({p}), the other with {theirs} ({q}).',
    'beam.only': 'The search finished only one hypothesis.',
    'beam.finished': 'Finished hypotheses',
    'beam.finishedHint': 'Scores are log-probabilities under the length penalty; the highest wins.',
    'beam.column.rank': 'Rank',
    'beam.column.text': 'Hypothesis',
    'beam.column.normalised': 'Score',
    'beam.column.sum': 'Sum',
    'beam.column.step': 'Step',
    'beam.column.token': 'Token',
    'beam.column.p': 'Probability',
    'beam.column.reason': 'Outcome',
    'beam.page': 'Candidates {from} to {to} of {count}',
    'beam.earlier': 'Earlier',
    'beam.later': 'Later',
    'beam.node': 'step {step}, {token}, probability {p}, {reason}',
    'beam.root': 'start',
    'beam.stop': '.',
    'beam.step': 'Step {step}',
    'beam.after': 'after {text}',
    'beam.sum': 'sum {sum}',
    'beam.continue': 'Continue from here',
    'beam.continueHint': 'Force this beginning and let the model finish it.',
    'beam.continueFile': 'To continue from here, run:',
    'reason.winner': 'kept: part of the translation',
    'reason.kept': 'kept: among the {width} best at this step',
    'reason.beam_full': 'dropped: its score {cum} is {short} short of {cut}, the last that fitted into the beam',
    'reason.finished': 'finished: number {rank} of the finished hypotheses, with score {normalised}',
    'reason.finishedPlain': 'finished: one of the best complete hypotheses',
    'reason.worse_finished': 'finished, but not among the best: they all have at least {cut}',
    'reason.length_cap': 'dropped: the maximum length was reached before it ended',
    'reason.no_repeat': 'forbidden: it would repeat an n-gram',
    'reason.constraint': 'forbidden: by a constraint or the forced beginning',
    'reason.duplicate': 'dropped: the same text as another hypothesis',
    'reason.early_stop': 'dropped: at best it could still reach {cut}, not enough to enter the best',
    'reason.unknown': 'dropped',
  },
  {
    'beam.shape.tree': '树',
    'beam.shape.list': '列表',
    'beam.shape.table': '表格',
    'beam.shapes': '搜索的显示方式',
    'beam.legend.winner': '译文',
    'beam.legend.kept': '留在束中',
    'beam.legend.dropped': '被舍弃',
    'beam.count': '{steps} 步中有 {nodes} 个候选，束宽 {width}',
    'beam.left': '（另有 {count} 个最差的未显示）',
    'beam.runner': '{other} 以 {score} 输给 {best}。两者在第 {step} 步分开：译文接着写 {ours}（{p}），另一个写 {theirs}（{q}）。',
    'beam.only': '搜索只完成了一个假设。',
    'beam.finished': '完成的假设',
    'beam.finishedHint': '得分是经长度惩罚的对数概率，最高者胜出。',
    'beam.column.rank': '名次',
    'beam.column.text': '假设',
    'beam.column.normalised': '得分',
    'beam.column.sum': '总和',
    'beam.column.step': '步',
    'beam.column.token': '词元',
    'beam.column.p': '概率',
    'beam.column.reason': '结果',
    'beam.page': '第 {from} 至 {to} 个候选，共 {count} 个',
    'beam.earlier': '前面',
    'beam.later': '后面',
    'beam.node': '第 {step} 步，{token}，概率 {p}，{reason}',
    'beam.root': '开始',
    'beam.stop': '。',
    'beam.step': '第 {step} 步',
    'beam.after': '接在 {text} 之后',
    'beam.sum': '总和 {sum}',
    'beam.continue': '从这里继续',
    'beam.continueHint': '固定这个开头，让模型写完。',
    'beam.continueFile': '要从这里继续，请运行：',
    'reason.winner': '保留：译文的一部分',
    'reason.kept': '保留：这一步最好的 {width} 个之一',
    'reason.beam_full': '舍弃：得分 {cum}，比束中最后一个的 {cut} 少 {short}',
    'reason.finished': '完成：完成的假设中第 {rank} 名，得分 {normalised}',
    'reason.finishedPlain': '完成：最好的完整假设之一',
    'reason.worse_finished': '已完成，但不在最好之列：它们都不低于 {cut}',
    'reason.length_cap': '舍弃：还没结束就到了最大长度',
    'reason.no_repeat': '禁止：会重复一个 n 元组',
    'reason.constraint': '禁止：由于约束或固定的开头',
    'reason.duplicate': '舍弃：与另一个假设文字相同',
    'reason.early_stop': '舍弃：最多只能达到 {cut}，进不了最好之列',
    'reason.unknown': '舍弃',
  },
);

const BEAM_ROW = 26;
const BEAM_COLUMN = 112;
const BEAM_LIST_ROW = 30;
const BEAM_PAGE = 100;
const BEAM_MARGIN = 18;

// Close the gaps that the tree layout leaves in a column, keeping its order, with the winner of every column level.
function beamPack(columns, y, winner) {
  let [top, bottom] = [0, 0];
  for (const column of columns) {
    column.sort((a, b) => y[a] - y[b]);
    const packed = new Float32Array(column.length);
    for (let i = 1; i < column.length; i++) {
      packed[i] = packed[i - 1] + Math.min(y[column[i]] - y[column[i - 1]], 1.5 * BEAM_ROW);
    }
    const won = column.findIndex((node) => winner.has(node));
    const level = won >= 0 ? packed[won] : packed[packed.length - 1] / 2;
    column.forEach((node, i) => {
      y[node] = packed[i] - level;
    });
    if (column.length) {
      top = Math.min(top, -level);
      bottom = Math.max(bottom, packed[packed.length - 1] - level);
    }
  }
  return [top, bottom];
}

// The nodes with what the drawing needs: children best first, the winner's path, positions by d3's tree layout.
export function buildBeam(ex) {
  if (!BEAM_TREES.has(ex)) BEAM_TREES.set(ex, beamTree(ex));
  return BEAM_TREES.get(ex);
}

const BEAM_TREES = new WeakMap();

function beamTree(ex) {
  if (!ex.beam) return null;
  const read = (name) => ex.tensor(ex.beam.nodes[name])?.data;
  const fields = Object.fromEntries(['parent', 'token', 'logprob', 'cum', 'step', 'reason', 'cut'].map((name) => [name, read(name)]));
  if (!fields.parent?.length) return null;
  const count = fields.parent.length;
  const children = Array.from({ length: count }, () => []);
  for (let i = 1; i < count; i++) children[fields.parent[i]].push(i);
  const winner = new Set([0]);
  const leaves = (ex.nbest ?? []).map((entry) => entry.leaf).filter((leaf) => leaf !== null && leaf !== undefined);
  for (let node = leaves[0] ?? 0; node > 0; node = fields.parent[node]) winner.add(node);
  for (const list of children) list.sort((a, b) => winner.has(b) - winner.has(a) || fields.cum[b] - fields.cum[a]);
  // The best child stands in the middle of its siblings, so the winner's path runs level.
  const spread = (list) => [...list.filter((_, i) => i % 2).reverse(), ...list.filter((_, i) => i % 2 === 0)];
  const root = globalThis.d3.hierarchy(0, (node) => (children[node].length ? spread(children[node]) : null));
  globalThis.d3.tree().nodeSize([BEAM_ROW, BEAM_COLUMN]).separation(() => 1)(root);
  const x = new Float32Array(count);
  const y = new Float32Array(count);
  root.each((point) => {
    x[point.data] = point.y + BEAM_MARGIN;
    y[point.data] = point.x;
  });
  const steps = fields.step.reduce((most, step) => Math.max(most, step), 0) + 1;
  const columns = Array.from({ length: steps + 1 }, () => []);
  for (let i = 0; i < count; i++) columns[fields.step[i] + 1].push(i);
  const [top, bottom] = beamPack(columns, y, winner);
  for (let i = 0; i < count; i++) y[i] += BEAM_MARGIN - top;
  return {
    ...fields,
    count,
    children,
    winner,
    leaves,
    x,
    y,
    columns,
    steps,
    width: ex.beam.width,
    reasons: ex.beam.reasons,
    extent: [(steps + 1) * BEAM_COLUMN + BEAM_MARGIN, bottom - top + 2 * BEAM_MARGIN],
  };
}

export function beamToken(ex, beam, node) {
  if (node === 0) return translate('beam.root');
  const text = ex.token_texts?.[beam.token[node]] ?? `#${beam.token[node]}`;
  return text.trim() || '␣';
}

function beamPath(beam, node) {
  const path = [];
  for (let at = node; at > 0; at = beam.parent[at]) path.push(at);
  return path.reverse();
}

// The n-best list, then the other hypotheses that ended, best first: {leaf, text, sum, normalised or null}.
export function beamFinished(ex, beam) {
  const listed = (ex.nbest ?? []).filter((entry) => entry.leaf !== null && entry.leaf !== undefined);
  // Only the GNMT penalty can be computed from the length; it must give the score that the search reported.
  const alpha = Number(/^gnmt ([\d.]+)$/.exec(ex.score?.penalty ?? '')?.[1] ?? NaN);
  const normalise = (node) => beam.cum[node] / ((5 + beam.step[node] + 1) / 6) ** alpha;
  const known = listed.length > 0 && Math.abs(normalise(listed[0].leaf) - listed[0].normalised) < 1e-3;
  const others = [];
  const name = beam.reasons.indexOf('worse_finished');
  for (let node = 1; node < beam.count; node++) {
    if (beam.reason[node] !== name) continue;
    others.push({ leaf: node, text: beamText(ex, beam, beam.parent[node]), sum: beam.cum[node], normalised: known ? normalise(node) : null });
  }
  others.sort((a, b) => (b.normalised ?? b.sum) - (a.normalised ?? a.sum));
  return [...listed, ...others];
}

function beamText(ex, beam, node) {
  return beamPath(beam, node).map((each) => ex.token_texts?.[beam.token[each]] ?? '').join('').trim();
}

// Whether the search continued with the node, or ended with it among its best.
function beamAlive(beam, node) {
  const reason = beam.reasons[beam.reason[node]];
  return reason === 'kept' || reason === 'finished';
}

// Why the node was kept or dropped, in words, from the scores of the search.
export function beamReason(ex, beam, node) {
  const name = beam.reasons[beam.reason[node]];
  if (name === 'finished') {
    const rank = beam.leaves.indexOf(node);
    if (rank < 0) return translate('reason.finishedPlain');
    const entry = ex.nbest.find((each) => each.leaf === node);
    return translate('reason.finished', { rank: rank + 1, normalised: formatScore(entry.normalised) });
  }
  if (name === 'kept') return translate(beam.winner.has(node) ? 'reason.winner' : 'reason.kept', { width: beam.width });
  const cut = beam.cut[node];
  if (['beam_full', 'worse_finished', 'early_stop'].includes(name) && Number.isNaN(cut)) return translate('reason.unknown');
  const known = ['beam_full', 'worse_finished', 'length_cap', 'no_repeat', 'constraint', 'duplicate', 'early_stop'];
  return translate(known.includes(name) ? `reason.${name}` : 'reason.unknown', {
    cum: formatNumber(beam.cum[node]),
    cut: name === 'beam_full' ? formatNumber(cut) : formatScore(cut),
    short: formatNumber(cut - beam.cum[node]),
  });
}

function beamSentence(words) {
  return `${words.slice(0, 1).toLocaleUpperCase()}${words.slice(1)}${translate('beam.stop')}`;
}

class BeamPanel {
  constructor(body, context) {
    this.context = context;
    this.shape = 'tree';
    this.beam = null;
    this.answer = element('p', { class: 'answer' });
    this.shapes = element('div', { class: 'segments', role: 'group' });
    this.stage = element('div', { class: 'beam-stage' });
    this.detail = element('div', { class: 'beam-detail' });
    this.nbest = element('div', { class: 'beam-nbest' });
    this.note = element('p', { class: 'quiet' });
    body.append(
      this.answer,
      element('div', { class: 'row beam-bar' }, this.shapes, this.note),
      this.stage,
      element('div', { class: 'beam-below' }, this.detail, this.nbest),
    );
    this.tree = new BeamTree(this);
    this.list = new BeamList(this);
    this.table = new BeamTable(this);
    context.onExplanation((ex) => this.build(ex));
    context.store.subscribe((state, changed) => {
      if (!this.beam || context.current() !== this.ex) return;
      if (['node', 'step', 'time'].some((key) => changed.has(key))) this.update(changed);
    });
    onTheme(() => this.beam && this.tree.draw());
  }

  get view() {
    return this[this.shape];
  }

  build(ex) {
    this.ex = ex;
    this.beam = buildBeam(ex);
    if (!this.beam) {
      this.stage.replaceChildren();
      return;
    }
    setAttributes(this.shapes, { 'aria-label': translate('beam.shapes') });
    this.shapes.replaceChildren(...['tree', 'list', 'table'].map((shape) => element('button', {
      type: 'button',
      'aria-pressed': shape === this.shape,
      onclick: (event) => {
        this.shape = shape;
        for (const each of this.shapes.children) each.setAttribute('aria-pressed', each === event.currentTarget);
        this.show();
      },
    }, translate(`beam.shape.${shape}`))));
    const left = ex.limits?.beam_dropped ?? 0;
    this.note.textContent = translate('beam.count', { nodes: this.beam.count - 1, steps: this.beam.steps, width: this.beam.width })
      + (left ? translate('beam.left', { count: left }) : '');
    this.finished = beamFinished(ex, this.beam);
    this.showAnswer();
    this.showNBest();
    this.show();
  }

  // The node that is selected, or the translation's node at the selected step.
  active() {
    const { node, step } = this.context.store.get();
    if (node !== null && node < this.beam.count) return node;
    return [...this.beam.winner].find((each) => this.beam.step[each] === step) ?? 0;
  }

  // Nodes after this step are not shown while stepping through decoding.
  horizon() {
    const { time, step } = this.context.store.get();
    return time ? (step ?? 0) : Infinity;
  }

  select(node, { announce = true } = {}) {
    const patch = { node };
    if (node > 0 && this.beam.winner.has(node) && this.beam.step[node] < this.ex.steps.length) patch.step = this.beam.step[node];
    this.context.store.set(patch);
    if (announce) this.context.announce(this.name(node));
  }

  name(node) {
    if (node === 0) return translate('beam.root');
    return translate('beam.node', {
      step: this.beam.step[node] + 1,
      token: beamToken(this.ex, this.beam, node),
      p: formatProbability(Math.exp(this.beam.logprob[node])),
      reason: beamReason(this.ex, this.beam, node),
    });
  }

  show() {
    this.stage.replaceChildren(this.view.node);
    this.view.build();
    this.update(new Set(['node']));
  }

  update(changed) {
    this.view.update(changed);
    this.showDetail();
    for (const row of this.nbest.querySelectorAll('tr[data-leaf]')) {
      row.classList.toggle('selected', Number(row.dataset.leaf) === this.context.store.get().node);
    }
  }

  showAnswer() {
    const { ex, beam } = this;
    const [best, other] = this.finished;
    this.answer.textContent = '';
    if (!other || !best) {
      if (this.finished.length === 1) this.answer.textContent = translate('beam.only');
      return;
    }
    const ours = beamPath(beam, best.leaf);
    const theirs = beamPath(beam, other.leaf);
    const at = ours.findIndex((node, i) => node !== theirs[i]);
    if (at < 0 || theirs[at] === undefined) return;
    const lang = ex.target.lang || null;
    const token = (node) => quoted(beamToken(ex, beam, node), lang);
    const score = (entry) => formatScore(entry.normalised ?? entry.sum);
    this.answer.replaceChildren(...fill(translate('beam.runner'), {
      other: quoted(other.text, lang),
      score: score(other),
      best: score(other.normalised === null ? { sum: best.sum } : best),
      step: at + 1,
      ours: token(ours[at]),
      theirs: token(theirs[at]),
      p: formatProbability(Math.exp(beam.logprob[ours[at]])),
      q: formatProbability(Math.exp(beam.logprob[theirs[at]])),
    }));
  }

  showNBest() {
    const { ex } = this;
    const head = ['rank', 'text', 'normalised', 'sum'].map((key) =>
      element('th', { scope: 'col', class: key === 'sum' ? 'optional' : null }, translate(`beam.column.${key}`)));
    const rows = this.finished.slice(0, 8).map((entry, rank) => element('tr', { 'data-leaf': entry.leaf },
      element('td', {}, rank + 1),
      element('th', { scope: 'row' }, element('button', { type: 'button', class: 'plain text', onclick: () => this.select(entry.leaf) },
        element('bdi', { lang: ex.target.lang || null }, entry.text))),
      element('td', {}, formatScore(entry.normalised)),
      element('td', { class: 'optional' }, formatNumber(entry.sum))));
    this.nbest.hidden = !rows.length;
    this.nbest.replaceChildren(
      element('h3', { id: 'beam-finished' }, translate('beam.finished')),
      element('table', { class: 'data', 'aria-labelledby': 'beam-finished' },
        element('thead', {}, element('tr', {}, head)), element('tbody', {}, rows)),
      element('p', { class: 'quiet' }, translate('beam.finishedHint')),
    );
  }

  showDetail() {
    const { ex, beam } = this;
    const node = this.active();
    if (node === 0) {
      this.detail.replaceChildren();
      return;
    }
    const lang = ex.target.lang || null;
    const path = beamPath(beam, beam.parent[node]);
    const before = (path.length > 12 ? '… ' : '') + path.slice(-12).map((each) => ex.token_texts?.[beam.token[each]] ?? '').join('').trim();
    const parts = [
      element('h3', {}, `${translate('beam.step', { step: beam.step[node] + 1 })} · `, quoted(beamToken(ex, beam, node), lang)),
      element('p', { class: 'answer', id: 'beam-reason' }, beamSentence(beamReason(ex, beam, node))),
      element('p', { class: 'quiet' },
        ...(before ? [...fill(translate('beam.after'), { text: quoted(before, lang) }), ' · '] : []),
        `${translate('beam.column.p')} ${formatProbability(Math.exp(beam.logprob[node]))} · `,
        translate('beam.sum', { sum: formatNumber(beam.cum[node]) })),
    ];
    const ids = beamPath(beam, node).map((each) => beam.token[each]);
    const isEnd = ex.target.tokens.some((token) => token.special && token.id === beam.token[node]);
    if (!beam.winner.has(node) && !isEnd) {
      if (this.context.api) {
        parts.push(element('div', { class: 'row' },
          element('button', { type: 'button', onclick: () => this.resume(ids) }, translate('beam.continue')),
          element('span', { class: 'quiet' }, translate('beam.continueHint'))));
      } else {
        parts.push(element('p', { class: 'quiet' }, translate('beam.continueFile')),
          element('code', { class: 'command', tabindex: '0' }, explainCommand(ex, ['--prefix', shellQuote(beamText(ex, beam, node))])));
      }
    }
    this.detail.replaceChildren(...parts);
  }

  // Translate again with the tokens up to a node forced.
  async resume(ids) {
    const { api, fail, replace, announce } = this.context;
    const { beam, length_penalty: penalty } = this.ex.request ?? {};
    announce(translate('page.loading'));
    try {
      const next = await api.explain({ text: this.ex.source.text, beam, length_penalty: penalty, prefix_ids: ids });
      this.context.store.set({ node: null });
      replace(decodeExplanation(next));
      this.context.visit('strip');
    } catch (error) {
      fail(error);
    }
  }
}

// The drawing: a canvas of the window's size under tree items for the nodes in view.
class BeamTree {
  constructor(panel) {
    this.panel = panel;
    this.canvas = element('canvas', { 'aria-hidden': 'true' });
    this.items = element('div', { class: 'beam-items', role: 'presentation' });
    this.space = element('div', { class: 'beam-space', role: 'presentation' }, this.canvas, this.items);
    this.scroller = element('div', { class: 'beam-scroller', role: 'tree', tabindex: '0', 'data-widget': 'beam' }, this.space);
    this.legend = element('p', { class: 'legend' });
    this.node = element('div', {}, this.scroller, this.legend);
    this.frame = 0;
    this.revealActive = () => panel.beam && this.reveal(panel.active());
    this.redraw = () => this.draw();
    this.scroller.addEventListener('scroll', () => this.schedule());
    this.scroller.addEventListener('keydown', (event) => this.move(event));
    this.scroller.addEventListener('click', (event) => {
      const item = event.target.closest('[role="treeitem"]');
      if (item) panel.select(Number(item.dataset.node));
    });
    new ResizeObserver(() => this.schedule()).observe(this.scroller);
  }

  build() {
    const { beam } = this.panel;
    setAttributes(this.scroller, { 'aria-label': translate('beam.title') });
    this.space.style.inlineSize = `${beam.extent[0]}px`;
    this.space.style.blockSize = `${beam.extent[1]}px`;
    this.scroller.style.blockSize = `${Math.min(beam.extent[1] + 26, 420)}px`;
    this.legend.replaceChildren(...['winner', 'kept', 'dropped'].map((kind) =>
      element('span', { class: `key beam-${kind}` }, translate(`beam.legend.${kind}`))));
    this.labels = new Map();
    this.version = (this.version ?? 0) + 1;
    this.center(this.panel.active());
  }

  schedule() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.panel.beam && this.draw());
  }

  update(changed) {
    if (changed.has('node') || changed.has('step')) paintLater(this.revealActive);
    paintLater(this.redraw);
  }

  center(node) {
    const { beam } = this.panel;
    this.scroller.scrollTop = beam.y[node] - this.scroller.clientHeight / 2;
  }

  // Scroll as little as brings the node into view.
  reveal(node) {
    const { beam } = this.panel;
    const box = this.scroller;
    const [x, y] = [beam.x[node], beam.y[node]];
    if (x < box.scrollLeft + BEAM_COLUMN) box.scrollLeft = x - BEAM_COLUMN - BEAM_MARGIN;
    else if (x + 2 * BEAM_COLUMN > box.scrollLeft + box.clientWidth) box.scrollLeft = x + 2 * BEAM_COLUMN - box.clientWidth;
    if (y < box.scrollTop + BEAM_ROW) box.scrollTop = y - 2 * BEAM_ROW;
    else if (y + 2 * BEAM_ROW > box.scrollTop + box.clientHeight) box.scrollTop = y + 2 * BEAM_ROW - box.clientHeight;
  }

  move(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { beam } = this.panel;
    const node = this.panel.active();
    const horizon = this.panel.horizon();
    const column = beam.columns[beam.step[node] + 1];
    const at = column.indexOf(node);
    const next = {
      ArrowRight: beam.children[node][0],
      ArrowLeft: beam.parent[node],
      ArrowDown: column[at + 1],
      ArrowUp: column[at - 1],
      Home: 0,
      End: beam.leaves[0],
    }[event.key];
    if (event.key === 'Enter' || event.key === ' ') this.panel.select(node);
    else if (!['ArrowRight', 'ArrowLeft', 'ArrowDown', 'ArrowUp', 'Home', 'End'].includes(event.key)) return;
    event.preventDefault();
    if (next !== undefined && next >= 0 && beam.step[next] <= horizon) this.panel.select(next);
  }

  draw() {
    const { panel, canvas, scroller } = this;
    const { beam, ex } = panel;
    if (!beam || !scroller.isConnected || !scroller.clientWidth) return;
    const [wide, high] = [scroller.clientWidth, scroller.clientHeight];
    const ratio = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(wide * ratio) || canvas.height !== Math.round(high * ratio)) {
      canvas.width = Math.round(wide * ratio);
      canvas.height = Math.round(high * ratio);
      canvas.style.inlineSize = `${wide}px`;
      canvas.style.blockSize = `${high}px`;
    }
    const [left, top] = [scroller.scrollLeft, scroller.scrollTop];
    const context = canvas.getContext('2d');
    context.setTransform(ratio, 0, 0, ratio, -left * ratio, -top * ratio);
    context.clearRect(left, top, wide, high);
    const colors = Object.fromEntries(['accent', 'accent-soft', 'edge', 'ink', 'panel'].map((name) => [name, themeColor(`--${name}`)]));
    const active = panel.active();
    const horizon = panel.horizon();
    const { step } = panel.context.store.get();
    const first = Math.max(0, Math.floor((left - BEAM_MARGIN) / BEAM_COLUMN) - 1);
    const last = Math.min(beam.steps, Math.ceil((left + wide) / BEAM_COLUMN) + 1, horizon + 1);
    if (step !== null && step + 1 >= first && step + 1 <= last) {
      context.fillStyle = colors['accent-soft'];
      context.globalAlpha = 0.45;
      context.fillRect(BEAM_MARGIN + (step + 1) * BEAM_COLUMN - 12, top, BEAM_COLUMN - 4, high);
      context.globalAlpha = 1;
    }
    const path = new Set(beamPath(beam, active));
    const shown = [];
    const near = (node) => beam.y[node] >= top - BEAM_ROW && beam.y[node] <= top + high + BEAM_ROW;
    context.font = `15px ${getComputedStyle(scroller).getPropertyValue('--serif')}`;
    const end = (node) => beam.x[node] + 10 + Math.min(BEAM_COLUMN - 34, this.measure(context, ex, node));
    for (const pass of ['dropped', 'kept', 'winner']) {
      context.beginPath();
      for (let column = Math.max(1, first); column <= last; column++) {
        for (const node of beam.columns[column]) {
          const kind = beam.winner.has(node) ? 'winner' : beamAlive(beam, node) ? 'kept' : 'dropped';
          const parent = beam.parent[node];
          if (kind !== pass || (!near(node) && !near(parent) && (beam.y[node] - top) * (beam.y[parent] - top) > 0)) continue;
          const [x0, y0, x1, y1] = [end(parent), beam.y[parent], beam.x[node] - 5, beam.y[node]];
          const bend = Math.max(12, (x1 - x0) / 2);
          context.moveTo(x0, y0);
          context.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
        }
      }
      context.strokeStyle = pass === 'winner' ? colors.accent : pass === 'kept' ? colors.ink : colors.edge;
      context.lineWidth = pass === 'winner' ? 3 : 1;
      context.setLineDash(pass === 'dropped' ? [3, 3] : []);
      context.stroke();
    }
    context.setLineDash([]);
    for (let column = first; column <= last; column++) {
      for (const node of beam.columns[column]) {
        if (!near(node)) continue;
        shown.push(node);
        const won = beam.winner.has(node);
        context.beginPath();
        context.arc(beam.x[node], beam.y[node], won ? 5 : 4, 0, 2 * Math.PI);
        context.fillStyle = won ? colors.accent : beamAlive(beam, node) ? colors.ink : colors.panel;
        context.fill();
        context.strokeStyle = won ? colors.accent : beamAlive(beam, node) ? colors.ink : colors.edge;
        context.lineWidth = 1.5;
        context.stroke();
        if (path.has(node)) {
          context.beginPath();
          context.arc(beam.x[node], beam.y[node], 8, 0, 2 * Math.PI);
          context.strokeStyle = colors.accent;
          context.lineWidth = node === active ? 2 : 1;
          context.stroke();
        }
      }
    }
    if (!shown.includes(active) && beam.step[active] <= horizon) shown.push(active);
    this.place(shown, active);
  }

  measure(context, ex, node) {
    const token = beamToken(ex, this.panel.beam, node);
    if (!this.labels.has(token)) this.labels.set(token, context.measureText(token).width);
    return this.labels.get(token);
  }

  // Tree items for the nodes in view, the elements of nodes that left it used again.
  place(nodes, active) {
    const { beam, ex } = this.panel;
    const shown = new Map([...this.items.children].map((item) => [Number(item.dataset.node), item]));
    const free = [...shown.entries()].filter(([node]) => !nodes.includes(node)).map(([, item]) => item);
    nodes.forEach((node) => {
      const item = shown.get(node) ?? free.pop() ?? this.items.appendChild(element('div', { role: 'treeitem' }, element('bdi')));
      const key = `${this.version} ${node}`;
      if (item.dataset.key !== key) {
        const siblings = node ? beam.children[beam.parent[node]] : [0];
        item.firstChild.textContent = beamToken(ex, beam, node);
        item.firstChild.lang = ex.target.lang || '';
        item.classList.toggle('winner', beam.winner.has(node));
        setAttributes(item, {
          id: `beam-node-${node}`,
          'data-node': node,
          'data-key': key,
          'aria-label': this.panel.name(node),
          'aria-level': beam.step[node] + 2,
          'aria-setsize': siblings.length,
          'aria-posinset': siblings.indexOf(node) + 1,
          'aria-expanded': beam.children[node].length ? 'true' : null,
        });
        item.style.transform = `translate(${beam.x[node] - 9}px, ${beam.y[node] - BEAM_ROW / 2}px)`;
      }
      if (item.ariaSelected !== String(node === active)) item.ariaSelected = String(node === active);
    });
    for (const item of free) item.remove();
    this.scroller.setAttribute('aria-activedescendant', `beam-node-${active}`);
  }
}

// The same nodes as an indented list; only the rows in view are in the document.
class BeamList {
  constructor(panel) {
    this.panel = panel;
    this.space = element('div', { class: 'beam-space', role: 'presentation' });
    this.scroller = element('div', { class: 'beam-scroller beam-list', role: 'tree', tabindex: '0', 'data-widget': 'beam' }, this.space);
    this.node = this.scroller;
    this.scroller.addEventListener('scroll', () => this.draw());
    this.scroller.addEventListener('keydown', (event) => this.move(event));
    this.scroller.addEventListener('click', (event) => {
      const item = event.target.closest('[role="treeitem"]');
      if (!item) return;
      const node = Number(item.dataset.node);
      if (event.target.closest('.twist')) this.toggle(node);
      else panel.select(node);
    });
  }

  build() {
    setAttributes(this.scroller, { 'aria-label': translate('beam.title') });
    this.open = new Set(this.panel.beam.winner);
    this.flatten();
  }

  flatten() {
    const { beam } = this.panel;
    const horizon = this.panel.horizon();
    this.rows = [];
    const stack = [0];
    while (stack.length) {
      const node = stack.pop();
      if (beam.step[node] > horizon) continue;
      this.rows.push(node);
      if (this.open.has(node)) for (let i = beam.children[node].length - 1; i >= 0; i--) stack.push(beam.children[node][i]);
    }
    this.space.style.blockSize = `${this.rows.length * BEAM_LIST_ROW}px`;
    this.draw();
  }

  toggle(node) {
    if (this.open.has(node)) this.open.delete(node);
    else this.open.add(node);
    this.flatten();
  }

  update() {
    const { beam } = this.panel;
    const active = this.panel.active();
    for (let node = beam.parent[active]; node >= 0; node = beam.parent[node]) this.open.add(node);
    this.flatten();
    const at = this.rows.indexOf(active) * BEAM_LIST_ROW;
    const box = this.scroller;
    if (at < box.scrollTop) box.scrollTop = at;
    else if (at + BEAM_LIST_ROW > box.scrollTop + box.clientHeight) box.scrollTop = at + BEAM_LIST_ROW - box.clientHeight;
    this.draw();
  }

  move(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { beam } = this.panel;
    const node = this.panel.active();
    const at = this.rows.indexOf(node);
    const open = this.open.has(node) && beam.children[node].length > 0;
    let next = null;
    if (event.key === 'ArrowDown') next = this.rows[at + 1];
    else if (event.key === 'ArrowUp') next = this.rows[at - 1];
    else if (event.key === 'Home') next = this.rows[0];
    else if (event.key === 'End') next = this.rows[this.rows.length - 1];
    else if (event.key === 'ArrowRight' && open) next = beam.children[node][0];
    else if (event.key === 'ArrowRight') this.toggle(node);
    else if (event.key === 'ArrowLeft' && open) this.toggle(node);
    else if (event.key === 'ArrowLeft') next = beam.parent[node];
    else if (event.key === 'Enter' || event.key === ' ') next = node;
    else return;
    event.preventDefault();
    if (next !== null && next !== undefined && next >= 0) this.panel.select(next);
  }

  draw() {
    const { beam, ex } = this.panel;
    if (!beam || !this.rows) return;
    const active = this.panel.active();
    const from = Math.max(0, Math.floor(this.scroller.scrollTop / BEAM_LIST_ROW) - 4);
    const to = Math.min(this.rows.length, from + Math.ceil((this.scroller.clientHeight || 420) / BEAM_LIST_ROW) + 8);
    this.space.replaceChildren(...this.rows.slice(from, to).map((node, i) => {
      const siblings = node ? beam.children[beam.parent[node]] : [0];
      const has = beam.children[node].length > 0;
      const row = element('div', {
        role: 'treeitem',
        id: `beam-node-${node}`,
        'data-node': node,
        class: beam.winner.has(node) ? 'winner' : beamAlive(beam, node) ? 'kept' : 'dropped',
        'aria-label': this.panel.name(node),
        'aria-level': beam.step[node] + 2,
        'aria-setsize': siblings.length,
        'aria-posinset': siblings.indexOf(node) + 1,
        'aria-selected': node === active,
        'aria-expanded': has ? String(this.open.has(node)) : null,
        var: { level: Math.min(beam.step[node] + 1, 12) },
      },
      element('span', { class: 'twist', 'aria-hidden': 'true' }, has ? (this.open.has(node) ? '▾' : '▸') : ''),
      element('span', { class: 'dot', 'aria-hidden': 'true' }),
      element('bdi', { lang: ex.target.lang || null }, beamToken(ex, beam, node)),
      element('span', { class: 'number' }, node ? formatProbability(Math.exp(beam.logprob[node])) : ''),
      element('span', { class: 'why' }, node ? beamReason(ex, beam, node) : ''));
      row.style.insetBlockStart = `${(from + i) * BEAM_LIST_ROW}px`;
      return row;
    }));
    if (this.rows.slice(from, to).includes(active)) this.scroller.setAttribute('aria-activedescendant', `beam-node-${active}`);
    else this.scroller.removeAttribute('aria-activedescendant');
  }
}

// The same nodes as a table, a hundred rows at a time.
class BeamTable {
  constructor(panel) {
    this.panel = panel;
    this.page = 0;
    this.node = element('div', { class: 'beam-table' });
  }

  build() {
    this.page = 0;
  }

  update() {
    const { beam, ex } = this.panel;
    const horizon = this.panel.horizon();
    const nodes = [];
    for (let node = 1; node < beam.count; node++) if (beam.step[node] <= horizon) nodes.push(node);
    const pages = Math.max(1, Math.ceil(nodes.length / BEAM_PAGE));
    this.page = Math.min(this.page, pages - 1);
    const from = this.page * BEAM_PAGE;
    const part = nodes.slice(from, from + BEAM_PAGE);
    const active = this.panel.active();
    const turn = (by) => () => {
      this.page += by;
      this.update();
    };
    const keys = ['step', 'token', 'p', 'sum', 'reason'];
    this.node.replaceChildren(
      element('div', { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': translate('beam.shape.table') },
        element('table', { class: 'data' },
          element('thead', {}, element('tr', {}, keys.map((key) => element('th', { scope: 'col' }, translate(`beam.column.${key}`))))),
          element('tbody', {}, part.map((node) => element('tr', { class: node === active ? 'selected' : '' },
            element('td', {}, beam.step[node] + 1),
            element('th', { scope: 'row' }, element('button', { type: 'button', class: 'plain text', onclick: () => this.panel.select(node) },
              element('bdi', { lang: ex.target.lang || null }, beamToken(ex, beam, node)))),
            element('td', {}, formatProbability(Math.exp(beam.logprob[node]))),
            element('td', {}, formatNumber(beam.cum[node])),
            element('td', { class: 'why' }, beamReason(ex, beam, node))))))),
      element('div', { class: 'row' },
        element('button', { type: 'button', disabled: this.page === 0, onclick: turn(-1) }, translate('beam.earlier')),
        element('span', { class: 'quiet' }, translate('beam.page', { from: from + 1, to: from + part.length, count: nodes.length })),
        element('button', { type: 'button', disabled: this.page >= pages - 1, onclick: turn(1) }, translate('beam.later'))),
    );
  }
}

export function mountBeam(body, context) {
  return new BeamPanel(body, context);
}
