// Eight steps over the person's own sentence; every number and word in them is computed from the explanation.
import { make, rootElement, setChildren } from './dom.js';
import { addTexts, formatChange, translate } from './i18n.js';
import { formatPart } from './strip.js';
import { beamScores, buildBeam } from './beam.js';
import { formatLogprob, panelOf, scrollToPanel, sentence } from './parts.js';
import { headName, parseHead } from './state.js';
import { siteAxis } from './table.js';
import { parseFragment } from './url.js';
import { quoted, shortened, tokenLabel } from './text.js';

const tourText = addTexts('tour', {
  title: ['Guided tour', '导览'],
  purpose: ['Eight short steps over this sentence, from tokens to what attention does not show.', '用这个句子走八小步：从词元到注意力没有告诉我们的事。'],
  start: ['Start the tour', '开始导览'],
  at: ['Step {at} of 8', '第 {at} 步，共 8 步'],
  next: ['Next', '下一步'],
  back: ['Back', '上一步'],
  leave: ['Leave the tour', '离开导览'],
  finish: ['Finish', '结束'],
  left: ['You left the tour.', '已离开导览。'],
  skip: ['Nothing to show here: {why}', '此处没有内容：{why}'],
  '1.title': ['The model reads tokens, not words', '模型读的是词元，不是词'],
  '1.text': ['Your sentence became {source} tokens and the translation {target}, each with a line under it.', '你的句子变成了 {source} 个词元，译文有 {target} 个，每个下面都有一条线。'],
  '1.split': ['{word} is {count} tokens: {parts}.', '{word} 由 {count} 个词元组成：{parts}。'],
  '2.title': ['Every token has a probability', '每个词元都有概率'],
  '2.text': ['The model was least sure of {token}, with {p}. Its next choice was {other} with {q}; take it and see where it leads.', '模型最没把握的是 {token}，概率 {p}。下一个选择是 {other}，{q}；采用它，看看会得到什么句子。'],
  '3.title': ['The search follows several hypotheses', '搜索同时跟踪几个假设'],
  '3.text': ['Every step kept the {width} best beginnings. The runner-up {other} ended with {score}, the translation with {best}: the higher score wins.', '每一步保留最好的 {width} 个开头。第二名 {other} 得分 {score}，译文 {best}，高者胜出。'],
  '3.alone': ['Every step kept the {width} best beginnings; only this one ended.', '每一步保留最好的 {width} 个开头，只有这一个写完了。'],
  '3.one': ['Beam 1 takes the most probable token at every step and never looks back.', '束宽为 1 时，每一步都取概率最大的词元，从不回头。'],
  '4.title': ['A head that aligns words', '一个对齐词语的头'],
  '4.text': ['For {token}, head {head} puts {weight} of its attention on {source}. Such heads connect output words with source words.', '写 {token} 时，头 {head} 把 {weight} 的注意力放在 {source} 上。这样的头把译文的词与原文的词连起来。'],
  '5.title': ['A head that seems to rest', '一个像在休息的头'],
  '5.text': ['Head {head} puts {part} of its attention on one token, {key}. Attention must sum to one, so an idle head parks it somewhere. Is this one idle?', '头 {head} 把 {part} 的注意力放在一个词元 {key} 上。注意力之和必须为一，没事可做的头总得停在某处。它也如此吗？'],
  '6.title': ['Switch the resting head off', '关掉休息的头'],
  '7.title': ['Switch the aligning head off', '关掉对齐的头'],
  effect: ['Head {head} is off. The translation’s log-probability changes by {effect}: {size}.', '头 {head} 已关闭。译文的对数概率变化 {effect}：{size}。'],
  measuring: ['Head {head} is off; its effect is being computed.', '头 {head} 已关闭，正在计算它的效果。'],
  '6.weak': ['Much attention is not much influence.', '注意力多不等于影响大。'],
  '6.strong': ['Even a head that seems to rest can matter; only switching it off shows it.', '看来休息的头也可能重要；只有拿掉它才知道。'],
  '7.strong': ['To test what a head does, take it away.', '要检验一个头的作用，就把它拿掉。'],
  'size.none': ['next to nothing', '几乎没有'],
  'size.some': ['a little', '一点点'],
  'size.much': ['a lot', '很多'],
  estimate: ['{effect} (estimated)', '{effect}（估计）'],
  '8.title': ['Where attention misleads', '注意力误导人的地方'],
  '8.text': ['For {token} the mean cross-attention is strongest on {attended}, but the output depends most on {relied}.', '对于 {token}，平均交叉注意力最强处是 {attended}，而输出最依赖的是 {relied}。'],
  '8.agree': ['Here attention and attribution agree on every token’s source word; often they do not.', '这里每个词元的注意力与归因都指向同一个原文词；但常常并非如此。'],
  '8.moral': ['Compare both before you call attention an explanation.', '在把注意力当作解释之前，请比较两者。'],
  'why.heads': ['the model has no such attention head.', '模型没有这类注意力头。'],
  'why.sink': ['no head rests on one token.', '没有停在一个词元上的头。'],
  'why.effect': ['the effect of this head was not computed.', '没有计算这个头的效果。'],
  'why.attribution': ['there is no attribution to compare with.', '没有可供比较的归因。'],
});

// The entry with the largest score; undefined where there is none.
const tourBest = (entries, score) => entries.reduce((best, each) => (best === undefined || score(each) > score(best) ? each : best), undefined);

// Name of a head with a label: for "align" that whose absence costs most, for the others that whose absence costs least.
function tourLabelled(ex, label) {
  const found = ex.heads.filter(({ labels, site }) =>
    labels.some(([name]) => name === label) && (label !== 'align' || ex.site(site).group === 'cross'));
  // By the estimate alone: an exact effect that comes later must not choose another head.
  const effect = (head) => head.effect.estimate ?? 0;
  const best = tourBest(found, (head) => -(label === 'align' ? effect(head) : Math.abs(effect(head))));
  return best && headName(best.site, best.head);
}

// The aligning head: by its label, or else the cross-attention head that most often reads what counted most.
function tourAlignHead(ex) {
  const names = ex.steps.map((_, t) => ex.strongestHead(t)?.name).filter(Boolean);
  return tourLabelled(ex, 'align') ?? tourBest(names, (name) => names.filter((each) => each === name).length);
}

// The key that gets most of a head's attention over all its rows, and its part.
function tourSink(ex, name) {
  const [id, head] = parseHead(name);
  const matrix = ex.siteMatrix(id, 'weights');
  if (!matrix) return null;
  const [, queries, keys] = matrix.shape;
  const mass = new Float32Array(keys);
  const start = head * queries * keys;
  for (let i = 0; i < queries * keys; i++) mass[i % keys] += matrix.data[start + i] / queries;
  const part = Math.max(...mass);
  const best = mass.indexOf(part);
  const at = matrix.pool?.k[best] ?? best;
  return { label: siteAxis(ex, ex.site(id), 'key', at + 1).labels[at], part };
}

// Without labels: the head with most of its attention on one key, if that is at least a third of it.
function tourParkedHead(ex) {
  const names = ex.sites.flatMap(({ id, heads }) => Array.from({ length: heads }, (_, head) => headName(id, head)));
  const part = (name) => tourSink(ex, name)?.part ?? 0;
  const best = tourBest(names, part);
  return best && part(best) >= 1 / 3 ? best : undefined;
}

function tourSplitWord({ words, tokens }) {
  const range = words.find(([from, to]) => to - from > 1 && to - from < 6);
  return range && tokens.slice(...range).map((token) => token.text);
}

// The eight steps: {view, patch, parts} with parts what the card says, or why it has nothing to say.
function tourSteps(ex, effects, served) {
  const { missing, source, target, steps } = ex;
  const token = (t) => quoted(tokenLabel(target.tokens[t]), target.lang);
  const sourceToken = (s) => quoted(tokenLabel(source.tokens[s]), source.lang);
  const strong = (name) => make('strong', name);
  const show = (view, patch, key, parts, ...more) => ({ view, patch, parts: [...sentence(`tour.${key}`, parts), ' ', ...more] });
  const skip = (view, why = '', patch = {}) => show(view, patch, 'skip', { why });
  const content = [...steps.keys()].filter((t) => !target.tokens[t]?.special);
  const unsure = tourBest(content, (t) => -steps[t].logprob) ?? 0;
  const align = tourAlignHead(ex);
  const sink = tourLabelled(ex, 'sink') ?? tourLabelled(ex, 'end') ?? tourParkedHead(ex);
  const select = (name) => {
    const [site, head] = parseHead(name);
    return { site, head, zoom: null };
  };

  function tokens() {
    const split = tourSplitWord(source) ?? tourSplitWord(target);
    return show('strip', { step: content[0] ?? 0 }, '1.text', { source: source.tokens.length, target: target.tokens.length },
      ...split ? sentence('tour.1.split', {
        word: quoted(split.join('').trim()),
        count: split.length,
        parts: make('span', split.flatMap((text, i) => [i ? ' + ' : '', quoted(text.trim())])),
      }) : []);
  }

  function probability() {
    const step = steps[unsure];
    const other = step?.top.find(([id]) => id !== step.id);
    return !other ? skip('strip', missing.strip) : show('strip', { step: unsure }, '2.text', {
      token: token(unsure),
      p: formatLogprob(step.logprob),
      other: quoted(tokenLabel({ text: other[1] }), target.lang),
      q: formatLogprob(other[2]),
    });
  }

  function search() {
    const { width } = ex.beam ?? {};
    if (!width) return skip('beam', missing.beam);
    const [best, other] = buildBeam(ex).finished();
    if (!other) return show('beam', {}, width === 1 ? '3.one' : '3.alone', { width });
    return show('beam', { node: other.leaf }, '3.text', { width, other: quoted(shortened(other.text), target.lang), ...beamScores(best, other) });
  }

  const readings = align ? content.flatMap((t) => {
    const row = ex.crossRow(...parseHead(align), t);
    const s = ex.sourceWeights(t)?.strongest ?? -1;
    return row && s >= 0 ? [{ t, s, weight: row[s] }] : [];
  }) : [];
  const reading = tourBest(readings, ({ weight }) => weight);
  const alignPatch = reading ? { ...select(align), step: reading.t, src: reading.s } : {};
  const rest = sink && tourSink(ex, sink);

  function switchOff(number, head, patch, why) {
    if (!head) return skip('head', missing.heads ?? translate(why));
    const off = { ...patch, off: [head] };
    const exact = effects[head] ?? ex.ablations[head]?.sum_change ?? ex.headSummary(head)?.effect.exact;
    const value = exact ?? ex.headEffect(head);
    if (!Number.isFinite(value)) {
      return served ? { ...show('head', off, 'measuring', { head: strong(head) }), head }
        : skip('head', tourText('why.effect'), patch);
    }
    const change = formatChange(value);
    const size = Math.abs(value) < 0.1 ? 'none' : Math.abs(value) < 1 ? 'some' : 'much';
    const moral = number === 6 && size === 'none' ? '6.weak' : `${number}.strong`;
    const step = show('head', off, 'effect', {
      head: strong(head),
      effect: Number.isFinite(exact) ? change : tourText('estimate', { effect: change }),
      size: tourText(`size.${size}`),
    }, tourText(moral));
    return { ...step, head };
  }

  function misleads() {
    if (!ex.attribution.length || !ex.crossSites().length) {
      return skip('token', missing.attribution ?? missing.token ?? tourText('why.attribution'));
    }
    const gaps = content.flatMap((t) => {
      const { from, strongest: relied } = ex.sourceWeights(t) ?? {};
      const mean = from === 'attribution' && ex.attentionMean(t);
      const attended = mean ? mean.indexOf(Math.max(...mean)) : relied;
      return attended === relied ? [] : [{ t, attended, relied, gap: mean[attended] - mean[relied] }];
    });
    const { t, attended, relied } = tourBest(gaps, ({ gap }) => gap) ?? {};
    const moral = tourText('8.moral');
    return t === undefined ? show('token', {}, '8.agree', {}, moral) : show('token', { step: t, src: attended }, '8.text', {
      token: token(t), attended: sourceToken(attended), relied: sourceToken(relied),
    }, moral);
  }

  return [
    tokens(),
    probability(),
    search(),
    !reading ? skip('head', missing.heads ?? tourText('why.heads')) : show('head', alignPatch, '4.text', {
      token: token(reading.t), head: strong(align), source: sourceToken(reading.s), weight: formatPart(reading.weight),
    }),
    !rest ? skip('head', missing.heads ?? tourText('why.sink')) : show('head', select(sink), '5.text', {
      head: strong(sink), part: formatPart(rest.part), key: quoted(rest.label),
    }),
    switchOff(6, sink, sink && select(sink), 'tour.why.sink'),
    switchOff(7, align, alignPatch, 'tour.why.heads'),
    misleads(),
  ];
}

export function mountTour(body, { store, api, current, onExplanation, announce }) {
  const section = body.closest('section');
  const opened = parseFragment(location.hash);
  let fresh = opened.tour !== null && opened.step === null && opened.site === null;
  let before = null; // heads that were off when the tour began
  let effects = {};
  let digest = null;

  const stepAt = (ex, at) => tourSteps(ex, effects, Boolean(api))[at - 1];
  const focusAction = (action) => body.querySelector(`[data-action="${action}"]`)?.focus({ preventScroll: true });

  // How much of the window the card covers, so that panels stop below it.
  function measureCard() {
    const height = store.get().tour === null ? 0 : section.offsetHeight;
    rootElement.style.setProperty('--tour', `${height}px`);
  }

  function go(ex, at, push = true) {
    if (store.get().tour === null && push) before = store.get().off;
    const { patch, view } = stepAt(ex, at);
    store.set({ off: before ?? [], node: null, ...patch, tour: at, view }, { push });
    requestAnimationFrame(() => scrollToPanel(view));
  }

  // The exact effect of the head that a step switches off, where a model can be asked.
  async function measure(ex, head) {
    if (!api || head in effects) return;
    try {
      const { sum_change: change } = await api.off([head]);
      if (current() !== ex) return;
      effects[head] = change;
      show(ex);
    } catch {
      // The estimate stays, and says that it is one.
    }
  }

  function leave() {
    store.set({ tour: null, off: before ?? [], view: 'strip' }, { push: true });
    before = null;
    announce(tourText('left'));
    body.querySelector('button').focus();
  }

  function show(ex) {
    const { tour } = store.get();
    section.classList.toggle('active', tour !== null);
    document.querySelector('.panel.toured')?.classList.remove('toured');
    if (tour === null) {
      const start = () => {
        go(ex, 1);
        focusAction('next');
      };
      setChildren(body, make('button.primary', { onclick: start }, tourText('start')));
      return;
    }
    const step = stepAt(ex, tour);
    panelOf(step.view).classList.add('toured');
    if (step.head) measure(ex, step.head);
    const focused = body.contains(document.activeElement) && document.activeElement.dataset.action;
    const button = (action, kind, onclick, key = action) => make(kind, { 'data-action': action, onclick }, tourText(key));
    const move = (by) => () => {
      go(ex, tour + by);
      announce(body.querySelector('.tour-text').textContent);
    };
    setChildren(body, make('div.tour-card',
      make('div',
        make('p.quiet', tourText('at', { at: tour })),
        make('h3', tourText(`${tour}.title`)),
        make('p.tour-text', step.parts)),
      make('div.row',
        tour > 1 && button('back', 'button', move(-1)),
        tour < 8 ? button('next', 'button.primary', move(1)) : button('next', 'button.primary', leave, 'finish'),
        tour < 8 && button('leave', 'button', leave))));
    measureCard();
    if (focused) focusAction(body.querySelector(`[data-action="${focused}"]`) ? focused : 'next');
  }

  onExplanation((ex) => {
    if (ex.digest !== digest) effects = {};
    digest = ex.digest;
    const { tour } = store.get();
    // After all panels have been built from this explanation.
    if (tour !== null && fresh) queueMicrotask(() => go(ex, tour, false));
    fresh = false;
    show(ex);
  });
  store.subscribe((state, changed) => {
    if (current() && changed.has('tour')) show(current());
  });
  new ResizeObserver(measureCard).observe(section);
}
