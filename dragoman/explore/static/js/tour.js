// Eight steps over the person's own sentence; every number and word in them is computed from the explanation.
import { addStrings, formatChange, formatProbability, formatScore, translate } from './i18n.js';
import { element } from './dom.js';
import { formatPart } from './strip.js';
import { beamFinished, buildBeam } from './beam.js';
import { parseFragment } from './url.js';
import { fill, quoted, tokenLabel } from './text.js';

addStrings(
  {
    'tour.start': 'Start the tour',
    'tour.at': 'Step {at} of 8',
    'tour.next': 'Next',
    'tour.previous': 'Back',
    'tour.leave': 'Leave the tour',
    'tour.finish': 'Finish',
    'tour.left': 'You left the tour; the panels are yours.',
    'tour.skip': 'This step has nothing to show here: {why}',
    'tour.1.title': 'The model reads tokens, not words',
    'tour.1.text': 'Your sentence became {source} tokens and the translation {target}, each marked by a line under the text.',
    'tour.1.split': 'The word {word} is {count} tokens: {parts}.',
    'tour.2.title': 'Every token has a probability',
    'tour.2.text': 'The model was least sure of {token}: it gave it probability {p}. Its next choice was {other} with {q}; take it in the list of alternatives to see the sentence it leads to.',
    'tour.3.title': 'The search follows several hypotheses',
    'tour.3.text': 'At every step the {width} best beginnings were kept. The runner-up {other} ended with {score}; the translation has {best}, and the higher score wins.',
    'tour.3.alone': 'At every step the {width} best beginnings were kept, and only this one came to an end.',
    'tour.measuring': 'Head {head} is off now; its effect is being computed.',
    'tour.3.one': 'With beam 1 the search takes the most probable token at every step and never looks back.',
    'tour.4.title': 'A head that aligns words',
    'tour.4.text': 'When the model writes {token}, head {head} reads {source}: {weight} of its attention is there. Heads like this one connect output words with source words.',
    'tour.5.title': 'A head that seems to rest',
    'tour.5.text': 'On average head {head} puts {part} of its attention on one token, {key}. Attention must sum to one, so a head with nothing to do has to park it somewhere; the next step tests whether this one does.',
    'tour.6.title': 'Switch the resting head off',
    'tour.6.text': 'Head {head} is off now. The log-probability of the whole translation changes by {effect}: {size}.',
    'tour.6.weak': 'Much attention is not the same as much influence.',
    'tour.6.strong': 'So even a head that seems to rest can matter; only switching it off shows it.',
    'tour.7.title': 'Switch the aligning head off',
    'tour.7.text': 'Now head {head} is off instead. The log-probability changes by {effect}: {size}.',
    'tour.7.strong': 'This is how to test what a head does: take it away.',
    'tour.size.none': 'next to nothing',
    'tour.size.some': 'a little',
    'tour.size.much': 'a lot',
    'tour.estimate': '{effect} (estimated)',
    'tour.8.title': 'Where attention misleads',
    'tour.8.text': 'For {token} the cross-attention, averaged over heads, is strongest on {attended}, but the output depends most on {relied}. Compare both before you call attention an explanation.',
    'tour.8.agree': 'In this sentence attention and attribution point to the same source word for every token; they often do not. Compare both before you call attention an explanation.',
    'tour.why.heads': 'the model has no attention heads of this kind in this sentence.',
    'tour.why.sink': 'no head of this model rests on one token in this sentence.',
    'tour.why.effect': 'the effect of this head was not computed.',
    'tour.why.attribution': 'there is no attribution to compare with.',
  },
  {
    'tour.start': '开始导览',
    'tour.at': '第 {at} 步，共 8 步',
    'tour.next': '下一步',
    'tour.previous': '上一步',
    'tour.leave': '离开导览',
    'tour.finish': '结束',
    'tour.left': '已离开导览，面板随你使用。',
    'tour.skip': '这一步在此没有内容：{why}',
    'tour.1.title': '模型读的是词元，不是词',
    'tour.1.text': '你的句子变成了 {source} 个词元，译文有 {target} 个，每个下面都有一条线。',
    'tour.1.split': '词 {word} 由 {count} 个词元组成：{parts}。',
    'tour.2.title': '每个词元都有概率',
    'tour.2.text': '模型最没把握的是 {token}：给它的概率是 {p}。下一个选择是 {other}，概率 {q}；在备选列表中采用它，看看会得到什么句子。',
    'tour.3.title': '搜索同时跟踪几个假设',
    'tour.3.text': '每一步保留最好的 {width} 个开头。第二名 {other} 的得分是 {score}，译文是 {best}，得分高的胜出。',
    'tour.3.alone': '每一步保留最好的 {width} 个开头，只有这一个写完了。',
    'tour.measuring': '头 {head} 现在关闭了，正在计算它的效果。',
    'tour.3.one': '束宽为 1 时，搜索每一步都取概率最大的词元，从不回头。',
    'tour.4.title': '一个对齐词语的头',
    'tour.4.text': '模型写 {token} 时，头 {head} 在读 {source}：它 {weight} 的注意力在那里。这样的头把译文的词与原文的词连起来。',
    'tour.5.title': '一个像在休息的头',
    'tour.5.text': '头 {head} 平均把 {part} 的注意力放在一个词元 {key} 上。注意力之和必须为一，没事可做的头总得停在某处；下一步检验它是否如此。',
    'tour.6.title': '关掉休息的头',
    'tour.6.text': '头 {head} 现在关闭了。整句译文的对数概率变化 {effect}：{size}。',
    'tour.6.weak': '注意力多不等于影响大。',
    'tour.6.strong': '看来休息的头也可能重要；只有拿掉它才知道。',
    'tour.7.title': '关掉对齐的头',
    'tour.7.text': '现在关闭的是头 {head}。对数概率变化 {effect}：{size}。',
    'tour.7.strong': '要检验一个头的作用，就把它拿掉。',
    'tour.size.none': '几乎没有',
    'tour.size.some': '一点点',
    'tour.size.much': '很多',
    'tour.estimate': '{effect}（估计）',
    'tour.8.title': '注意力误导人的地方',
    'tour.8.text': '对于 {token}，各头平均的交叉注意力最强处是 {attended}，而输出最依赖的是 {relied}。在把注意力当作解释之前，请比较两者。',
    'tour.8.agree': '在这个句子里，每个词元的注意力与归因都指向同一个原文词；但常常并非如此。在把注意力当作解释之前，请比较两者。',
    'tour.why.heads': '模型在这个句子里没有这类注意力头。',
    'tour.why.sink': '在这个句子里，这个模型没有停在一个词元上的头。',
    'tour.why.effect': '没有计算这个头的效果。',
    'tour.why.attribution': '没有可供比较的归因。',
  },
);

function tourArgMax(values) {
  let best = 0;
  for (let i = 1; i < values.length; i++) if (values[i] > values[best]) best = i;
  return best;
}

// Head with a label: for "align" that whose absence costs most, for "sink" that whose absence costs least.
export function tourHead(ex, label, group) {
  const found = (ex.heads ?? []).filter((head) =>
    head.labels?.some(([name]) => name === label) && (!group || ex.site(head.site)?.group === group));
  // By the estimate alone: an exact effect that comes later must not choose another head.
  const effect = (head) => head.effect?.estimate ?? 0;
  found.sort((a, b) => (label === 'align' ? effect(a) - effect(b) : Math.abs(effect(a)) - Math.abs(effect(b))));
  const first = found[0];
  return first ? { site: first.site, head: first.head, name: `${first.site}.${first.head}` } : null;
}

// The aligning head: by its label, or else the cross-attention head that most often reads what counted most.
function tourAlignHead(ex) {
  const labelled = tourHead(ex, 'align', 'cross');
  if (labelled) return labelled;
  const votes = new Map();
  ex.steps.forEach((_, t) => {
    const head = ex.strongestHead(t);
    if (head) votes.set(head.name, (votes.get(head.name) ?? 0) + 1);
  });
  const [name] = [...votes].sort((a, b) => b[1] - a[1])[0] ?? [];
  if (!name) return null;
  const at = name.lastIndexOf('.');
  return { site: name.slice(0, at), head: Number(name.slice(at + 1)), name };
}

// The key that gets most of a head's attention over all its rows, and its part.
function tourSink(ex, { site: id, head }) {
  const site = ex.site(id);
  const matrix = ex.siteMatrix(id, 'weights');
  if (!matrix) return null;
  const [, queries, keys] = matrix.shape;
  const mass = new Float32Array(keys);
  for (let q = 0; q < queries; q++) for (let k = 0; k < keys; k++) mass[k] += matrix.data[(head * queries + q) * keys + k] / queries;
  const best = tourArgMax(mass);
  const first = matrix.pool?.k ? matrix.pool.k[best] : best;
  const tokens = site.key === 'source' ? ex.source.tokens : ex.target.tokens;
  const label = site.key_labels?.[first]
    ?? (site.key === 'target_in' ? (first === 0 ? '<s>' : tokenLabel(tokens[first - 1])) : tokenLabel(tokens[first] ?? { text: '' }));
  return { label, part: mass[best] };
}

// Without labels: the head with most of its attention on one key, if that is at least a third of it.
function tourParkedHead(ex) {
  let best = null;
  for (const { id, heads } of ex.sites ?? []) {
    for (let head = 0; head < heads; head++) {
      const part = tourSink(ex, { site: id, head })?.part ?? 0;
      if (part >= 1 / 3 && (!best || part > best.part)) best = { site: id, head, name: `${id}.${head}`, part };
    }
  }
  return best;
}

function tourSplitWord(side) {
  const range = (side.words ?? []).find(([from, to]) => to - from > 1 && to - from < 6);
  return range ? side.tokens.slice(range[0], range[1]).map((token) => token.text) : null;
}

// The eight steps: {view, patch, parts} with parts what the card says, or why it has nothing to say.
export function tourSteps(ex, effects = {}, served = false) {
  const lang = ex.target?.lang || null;
  const say = (key, values = {}) => fill(translate(key), values);
  const targetToken = (t) => quoted(tokenLabel(ex.target.tokens[t]), lang);
  const sourceToken = (s) => quoted(tokenLabel(ex.source.tokens[s]), ex.source.lang || null);
  const skip = (view, why, patch = {}) => ({ view, patch, parts: say('tour.skip', { why }) });
  const content = ex.steps.map((_, t) => t).filter((t) => !ex.target.tokens[t]?.special);
  const unsure = [...content].sort((a, b) => ex.steps[a].logprob - ex.steps[b].logprob)[0] ?? 0;
  const align = tourAlignHead(ex);
  const sink = tourHead(ex, 'sink') ?? tourHead(ex, 'end') ?? tourParkedHead(ex);
  const effectOf = (head) => {
    const known = effects[head.name] ?? ex.ablations?.[head.name]?.sum_change ?? ex.headSummary(head.name)?.effect?.exact;
    const value = known ?? ex.headEffect(head.name);
    if (value === null || value === undefined) return null;
    const text = formatChange(value);
    const size = Math.abs(value) < 0.1 ? 'none' : Math.abs(value) < 1 ? 'some' : 'much';
    return {
      effect: known === undefined || known === null ? translate('tour.estimate', { effect: text }) : text,
      size: translate(`tour.size.${size}`),
      weak: size === 'none',
    };
  };
  const steps = [];

  const split = tourSplitWord(ex.source) ?? tourSplitWord(ex.target);
  const first = say('tour.1.text', { source: String(ex.source.tokens.length), target: String(ex.target.tokens.length) });
  if (split) {
    const parts = split.flatMap((text, i) => [i ? ' + ' : '', quoted(text.trim())]);
    first.push(' ', ...say('tour.1.split', { word: quoted(split.join('').trim()), count: String(split.length), parts: element('span', {}, parts) }));
  }
  steps.push({ view: 'strip', patch: { step: content[0] ?? 0 }, parts: first });

  const step = ex.steps[unsure];
  const other = step?.top.find(([id]) => id !== step.id);
  steps.push(step && other
    ? {
      view: 'strip',
      patch: { step: unsure },
      parts: say('tour.2.text', {
        token: targetToken(unsure),
        p: formatProbability(Math.exp(step.logprob)),
        other: quoted(tokenLabel({ text: other[1] }), lang),
        q: formatProbability(Math.exp(other[2])),
      }),
    }
    : skip('strip', ex.missing?.strip ?? ''));

  const tree = buildBeam(ex);
  const [best, runner] = tree ? beamFinished(ex, tree) : [];
  if (!ex.beam || ex.missing?.beam) steps.push(skip('beam', ex.missing?.beam ?? ''));
  else if (!runner) steps.push({ view: 'beam', patch: {}, parts: say(ex.beam.width === 1 ? 'tour.3.one' : 'tour.3.alone', { width: String(ex.beam.width) }) });
  else {
    steps.push({
      view: 'beam',
      patch: { node: runner.leaf },
      parts: say('tour.3.text', {
        width: String(ex.beam.width),
        other: quoted(runner.text, lang),
        score: formatScore(runner.normalised ?? runner.sum),
        best: formatScore(runner.normalised === null ? best.sum : best.normalised),
      }),
    });
  }

  const why = ex.missing?.heads ?? translate('tour.why.heads');
  let reading = null;
  if (align) {
    for (const t of content) {
      const row = ex.crossRow(align.site, align.head, t);
      const s = ex.sourceWeights(t)?.strongest ?? -1;
      if (row && s >= 0 && (!reading || row[s] > reading.weight)) reading = { t, s, weight: row[s] };
    }
  }
  const alignPatch = reading ? { site: align.site, head: align.head, step: reading.t, src: reading.s, zoom: null } : {};
  steps.push(reading
    ? {
      view: 'head',
      patch: alignPatch,
      parts: say('tour.4.text', {
        token: targetToken(reading.t),
        head: element('strong', {}, align.name),
        source: sourceToken(reading.s),
        weight: formatPart(reading.weight),
      }),
    }
    : skip('head', why));

  const sinkWhy = ex.missing?.heads ?? translate('tour.why.sink');
  const rest = sink && tourSink(ex, sink);
  const sinkPatch = sink ? { site: sink.site, head: sink.head, zoom: null } : {};
  steps.push(rest
    ? {
      view: 'head',
      patch: sinkPatch,
      parts: say('tour.5.text', { head: element('strong', {}, sink.name), part: formatPart(rest.part), key: quoted(rest.label) }),
    }
    : skip('head', sinkWhy));

  for (const [key, head, patch] of [['tour.6.text', sink, sinkPatch], ['tour.7.text', align, alignPatch]]) {
    const effect = head && effectOf(head);
    if (!head) steps.push(skip('head', head === sink ? sinkWhy : why));
    else if (!effect && served) {
      const parts = say('tour.measuring', { head: element('strong', {}, head.name) });
      steps.push({ view: 'head', patch: { ...patch, off: [head.name] }, parts, head: head.name });
    } else if (!effect) steps.push(skip('head', translate('tour.why.effect'), patch));
    else {
      const parts = say(key, { head: element('strong', {}, head.name), ...effect });
      const moral = key === 'tour.7.text' ? 'tour.7.strong' : effect.weak ? 'tour.6.weak' : 'tour.6.strong';
      parts.push(' ', ...say(moral));
      steps.push({ view: 'head', patch: { ...patch, off: [head.name] }, parts, head: head.name });
    }
  }

  steps.push(tourMisleads(ex, content, targetToken, sourceToken, say, skip));
  return steps;
}

function tourMisleads(ex, content, targetToken, sourceToken, say, skip) {
  if (!ex.attribution?.length || !ex.crossSites().length) {
    return skip('token', ex.missing?.attribution ?? ex.missing?.token ?? translate('tour.why.attribution'));
  }
  let worst = null;
  for (const t of content) {
    const relied = ex.sourceWeights(t);
    const mean = ex.attentionMean(t);
    if (!relied || !mean || relied.from !== 'attribution') continue;
    const attended = tourArgMax(mean);
    const gap = mean[attended] - mean[relied.strongest];
    if (attended !== relied.strongest && (!worst || gap > worst.gap)) worst = { t, attended, relied: relied.strongest, gap };
  }
  if (!worst) return { view: 'token', patch: {}, parts: say('tour.8.agree') };
  return {
    view: 'token',
    patch: { step: worst.t, src: worst.attended },
    parts: say('tour.8.text', {
      token: targetToken(worst.t),
      attended: sourceToken(worst.attended),
      relied: sourceToken(worst.relied),
    }),
  };
}

class TourPanel {
  constructor(body, context) {
    this.body = body;
    this.context = context;
    this.section = body.closest('section');
    this.before = null;
    this.effects = {};
    const opened = parseFragment(location.hash);
    this.fresh = opened.tour !== null && opened.step === null && opened.site === null;
    context.onExplanation((ex) => {
      if (ex.digest !== this.digest) this.effects = {};
      this.digest = ex.digest;
      const { tour } = context.store.get();
      // After all panels have been built from this explanation.
      if (tour !== null && this.fresh) queueMicrotask(() => this.go(ex, tour, { push: false }));
      this.fresh = false;
      this.show(ex);
    });
    context.store.subscribe((state, changed) => {
      const ex = context.current();
      if (ex && changed.has('tour')) this.show(ex);
    });
    new ResizeObserver(() => this.measureCard()).observe(this.section);
  }

  // How much of the window the card covers, so that panels stop below it.
  measureCard() {
    const active = this.context.store.get().tour !== null;
    document.documentElement.style.setProperty('--tour', active ? `${this.section.offsetHeight}px` : '0px');
  }

  go(ex, at, { push = true } = {}) {
    const { store } = this.context;
    if (store.get().tour === null && push) this.before = [...store.get().off];
    const step = tourSteps(ex, this.effects, Boolean(this.context.api))[at - 1];
    store.set({ off: this.before ?? [], node: null, ...step.patch, tour: at, view: step.view }, { push });
    this.scroll(step.view);
  }

  scroll(view) {
    const calm = matchMedia('(prefers-reduced-motion: reduce)').matches;
    requestAnimationFrame(() => document.getElementById(`panel-${view}`)
      .scrollIntoView({ block: 'start', behavior: calm ? 'instant' : 'smooth' }));
  }

  // The exact effect of the head that a step switches off, where a model can be asked.
  async measure(ex, head) {
    if (!this.context.api || head in this.effects) return;
    try {
      const ablation = await this.context.api.off([head]);
      if (this.context.current() !== ex) return;
      this.effects[head] = ablation.sum_change;
      this.show(ex);
    } catch {
      // The estimate stays, and says that it is one.
    }
  }

  leave() {
    const { store, announce } = this.context;
    store.set({ tour: null, off: this.before ?? [], view: 'strip' }, { push: true });
    this.before = null;
    announce(translate('tour.left'));
    this.body.querySelector('button')?.focus();
  }

  show(ex) {
    const { tour } = this.context.store.get();
    this.section.classList.toggle('active', tour !== null);
    for (const panel of document.querySelectorAll('.panel.toured')) panel.classList.remove('toured');
    if (tour === null) {
      this.body.replaceChildren(element('button', { type: 'button', class: 'primary', onclick: () => this.start(ex) }, translate('tour.start')));
      return;
    }
    const step = tourSteps(ex, this.effects, Boolean(this.context.api))[tour - 1];
    document.getElementById(`panel-${step.view}`).classList.add('toured');
    if (step.head) this.measure(ex, step.head);
    const focus = this.body.contains(document.activeElement) ? document.activeElement.dataset.action : null;
    const button = (action, key, run, primary = false) => element('button', {
      type: 'button', class: primary ? 'primary' : null, 'data-action': action, onclick: run,
    }, translate(key));
    const move = (by) => () => {
      this.go(ex, tour + by);
      this.context.announce(this.body.querySelector('.tour-text')?.textContent ?? '');
    };
    this.body.replaceChildren(
      element('div', { class: 'tour-card' },
        element('div', {},
          element('p', { class: 'quiet' }, translate('tour.at', { at: tour })),
          element('h3', {}, translate(`tour.${tour}.title`)),
          element('p', { class: 'tour-text' }, step.parts)),
        element('div', { class: 'row' },
          tour > 1 ? button('back', 'tour.previous', move(-1)) : null,
          tour < 8 ? button('next', 'tour.next', move(1), true) : button('next', 'tour.finish', () => this.leave(), true),
          tour < 8 ? button('leave', 'tour.leave', () => this.leave()) : null)),
    );
    this.measureCard();
    if (focus) (this.body.querySelector(`[data-action="${focus}"]`) ?? this.body.querySelector('[data-action="next"]')).focus({ preventScroll: true });
  }

  start(ex) {
    this.go(ex, 1);
    this.body.querySelector('[data-action="next"]')?.focus({ preventScroll: true });
  }
}

export function mountTour(body, context) {
  return new TourPanel(body, context);
}
