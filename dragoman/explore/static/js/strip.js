// The translation as running text: probabilities, where each token was read from, alternatives, steps of decoding.
import { addStrings, currentLanguage, formatNumber, formatProbability, formatScore, translate } from './i18n.js';
import { decodeExplanation } from './data.js';
import { element, setAttributes } from './dom.js';
import { rovingFocus } from './keys.js';
import { compareTokens, fill, quoted, renderText, tokenLabel } from './text.js';

addStrings(
  {
    'strip.source': 'Source',
    'strip.target': 'Translation',
    'strip.target@classify': 'Classes',
    'strip.target@pairs': 'Classes',
    'strip.target@tag': 'Tags',
    'strip.target@language': 'Text',
    'strip.source@other': 'Input',
    'strip.legend.bar': 'probability',
    'strip.legend.low': 'below 0.5',
    'strip.legend.forced': 'forced by you',
    'strip.legend.source': 'how much it counted for the selected token',
    'strip.nameTarget': 'target {at} of {count}, {text}, probability {p}',
    'strip.nameStrongest': ', strongest source {source}',
    'strip.nameForced': ', forced',
    'strip.nameLater': 'target {at} of {count}, not yet predicted',
    'strip.nameSource': 'source {at} of {count}, {text}',
    'strip.nameSourceWeight': ', {part} of the {measure} for the selected token',
    'strip.measure.attribution': 'attribution',
    'strip.measure.attention': 'attention',
    'strip.step': 'Token {at} of {count}',
    'strip.back': 'One step back',
    'strip.forward': 'One step forward',
    'strip.dock': 'Selected token',
    'strip.time': 'Step through: hide what came later',
    'strip.read.attribution': '{token} was read mostly from {source}: {part} of its attribution to the source.',
    'strip.readOther': 'Attention disagrees: averaged over heads it is mostly on {source}, {part}; compare both under One token.',
    'strip.read.attribution@other': 'What counted most for {token} is {source}: {part} of the attribution.',
    'strip.read.attention@other': 'What counted most for {token} is {source}: {part} of the attention.',
    'strip.read.attention': '{token} was read mostly from {source}: {part} of the cross-attention, averaged over heads.',
    'strip.readHead': 'Head {head} attends to it most, with weight {weight}.',
    'strip.openHead': 'Show this head',
    'strip.probability': 'Probability',
    'strip.rank': 'Rank',
    'strip.entropy': 'Entropy',
    'strip.logprob': 'Log-probability',
    'strip.cumulative': 'Sum so far',
    'strip.nats': '{value} nats',
    'strip.masked': '{count} tokens were forbidden here.',
    'strip.alternatives': 'Alternatives for this token',
    'strip.alternativesHint': 'Take one: everything before it stays, the rest is translated again.',
    'strip.alternativesFile': 'This file has the translations of those marked “ready”; dragoman explore can take them all.',
    'strip.alternativesNone': 'This file has no translation with another token: write it with --branches 2, or use dragoman explore.',
    'strip.chosen': 'chosen',
    'strip.ready': 'ready',
    'strip.changed': 'What changed',
    'strip.summary': '{changed} of {count} tokens changed, score {before} → {after}',
    'strip.before': 'Before',
    'strip.after': 'After',
    'strip.kept': 'kept',
    'strip.mark.changed': 'changed',
    'strip.mark.new': 'new',
    'strip.undo': 'Back to before',
    'strip.dismiss': 'Close the comparison',
    'strip.score': 'Score',
    'strip.scoreLine': 'sum of log-probabilities {sum}, normalised {normalised} ({penalty})',
    'strip.reference': 'This is your reference, scored by the model',
    'strip.search': 'Search error: the model scores your reference {reference}, above the {own} of what the search found, so a better search would have preferred it.',
    'strip.cut': 'Search error: the model’s own translation was cut at its maximum length; your reference ends, so it ranks first whatever the scores: {reference} for the reference, {own} for the translation.',
    'strip.equal': 'The model scores your reference as its own translation, {own}.',
    'strip.modelError': 'Model error: the model scores your reference {reference}, below the {own} of its own translation, so no search would have found it.',
    'strip.own': 'Its own translation:',
    'strip.same': 'The model’s translation is your reference.',
  },
  {
    'strip.source': '原文',
    'strip.target': '译文',
    'strip.target@classify': '类别',
    'strip.target@pairs': '类别',
    'strip.target@tag': '标注',
    'strip.target@language': '文字',
    'strip.source@other': '输入',
    'strip.legend.bar': '概率',
    'strip.legend.low': '低于 0.5',
    'strip.legend.forced': '由你指定',
    'strip.legend.source': '对选中词元的作用大小',
    'strip.nameTarget': '译文第 {at} 个，共 {count} 个，{text}，概率 {p}',
    'strip.nameStrongest': '，最强的原文 {source}',
    'strip.nameForced': '，已指定',
    'strip.nameLater': '译文第 {at} 个，共 {count} 个，尚未预测',
    'strip.nameSource': '原文第 {at} 个，共 {count} 个，{text}',
    'strip.nameSourceWeight': '，占选中词元{measure}的 {part}',
    'strip.measure.attribution': '归因',
    'strip.measure.attention': '注意力',
    'strip.step': '第 {at} 个词元，共 {count} 个',
    'strip.back': '后退一步',
    'strip.forward': '前进一步',
    'strip.dock': '选中的词元',
    'strip.time': '逐步播放：隐藏之后的内容',
    'strip.readOther': '注意力不同意：各头平均主要落在 {source} 上，占 {part}；请在“单个词元”中比较两者。',
    'strip.read.attribution': '{token} 主要读自 {source}：占它对原文归因的 {part}。',
    'strip.read.attribution@other': '对 {token} 作用最大的是 {source}：占归因的 {part}。',
    'strip.read.attention@other': '对 {token} 作用最大的是 {source}：占注意力的 {part}。',
    'strip.read.attention': '{token} 主要读自 {source}：占各头平均交叉注意力的 {part}。',
    'strip.readHead': '头 {head} 对它的注意力最大，权重 {weight}。',
    'strip.openHead': '显示这个头',
    'strip.probability': '概率',
    'strip.rank': '排名',
    'strip.entropy': '熵',
    'strip.logprob': '对数概率',
    'strip.cumulative': '累计',
    'strip.nats': '{value} 奈特',
    'strip.masked': '此处禁止了 {count} 个词元。',
    'strip.alternatives': '这个词元的备选',
    'strip.alternativesHint': '采用一个：之前的保持不变，之后的重新翻译。',
    'strip.alternativesFile': '这个文件只含标有“就绪”的备选的译文；dragoman explore 可以采用全部备选。',
    'strip.alternativesNone': '这个文件不含换用其他词元的译文：请用 --branches 2 写出文件，或使用 dragoman explore。',
    'strip.chosen': '已选',
    'strip.ready': '就绪',
    'strip.changed': '有何变化',
    'strip.summary': '{count} 个词元中有 {changed} 个改变，得分 {before} → {after}',
    'strip.before': '之前',
    'strip.after': '之后',
    'strip.kept': '保留',
    'strip.mark.changed': '改变',
    'strip.mark.new': '新增',
    'strip.undo': '回到之前',
    'strip.dismiss': '关闭对比',
    'strip.score': '得分',
    'strip.scoreLine': '对数概率之和 {sum}，归一化 {normalised}（{penalty}）',
    'strip.reference': '这是你的参考译文，由模型打分',
    'strip.search': '搜索错误：模型给参考译文 {reference}，高于搜索所得的 {own}；更好的搜索会选它。',
    'strip.cut': '搜索错误：模型自己的译文在最大长度处被截断；参考译文有结尾，因此无论得分如何都排在它之前：参考译文 {reference}，模型译文 {own}。',
    'strip.equal': '模型给参考译文和自己的译文相同的得分 {own}。',
    'strip.modelError': '模型错误：模型给参考译文 {reference}，低于自己译文的 {own}；任何搜索都不会找到它。',
    'strip.own': '它自己的译文：',
    'strip.same': '模型的译文就是你的参考译文。',
  },
);

export function formatPart(value) {
  const percent = 100 * value;
  return `${percent > 0 && percent < 1 ? '<1' : Math.round(percent)} %`;
}

// The full name of a target token for screen readers: position, text, probability, strongest source token.
export function targetName(ex, t) {
  const step = ex.steps[t];
  const weights = ex.sourceWeights(t);
  const parts = [
    translate('strip.nameTarget', {
      at: t + 1,
      count: ex.target.tokens.length,
      text: tokenLabel(ex.outputToken(t)),
      p: formatProbability(Math.exp(step.logprob)),
    }),
  ];
  if (weights && weights.strongest >= 0) {
    parts.push(translate('strip.nameStrongest', { source: tokenLabel(ex.source.tokens[weights.strongest]) }));
  }
  if (step.forced) parts.push(translate('strip.nameForced'));
  return parts.join('');
}

// Near zero, two digits would hide what a sure token costs.
function stripLog(value) {
  return formatNumber(value, Math.abs(value) < 0.1 ? 3 : 2);
}

function stripSourceName(ex, s, t) {
  const weights = t === null ? null : ex.sourceWeights(t);
  const name = translate('strip.nameSource', {
    at: s + 1,
    count: ex.source.tokens.length,
    text: tokenLabel(ex.source.tokens[s]),
  });
  if (!weights) return name;
  const measure = translate(`strip.measure.${weights.from}`);
  return name + translate('strip.nameSourceWeight', { part: formatPart(weights.values[s]), measure });
}

function stripLanguage(code) {
  if (!code) return '';
  try {
    return new Intl.DisplayNames([currentLanguage()], { type: 'language' }).of(code) ?? code;
  } catch {
    return code;
  }
}

function stripWordOf(side, index) {
  const range = (side.words ?? []).find(([from, to]) => from <= index && index < to);
  if (!range || range[1] - range[0] < 2) return tokenLabel(side.tokens[index]);
  const word = side.tokens.slice(range[0], range[1]).map((token) => token.text).join('').trim();
  return word && word.length <= 40 ? word : tokenLabel(side.tokens[index]);
}

export function shellQuote(text) {
  return /^[\w./-]+$/.test(text) ? text
    : /[\t\n]/.test(text) ? `$'${text.replace(/[\\']/g, '\\$&').replace(/\t/g, '\\t').replace(/\n/g, '\\n')}'`
      : `'${text.replace(/'/g, "'\\''")}'`;
}

// The command that writes this page again, for files without a model behind them.
export function explainCommand(ex, extra = []) {
  const request = ex.request ?? {};
  const parts = ['dragoman explain -m', ex.model?.path ? shellQuote(ex.model.path) : 'MODEL', shellQuote(request.text ?? ex.source?.text ?? '')];
  const tag = ex.source?.tokens?.[0];
  const to = tag?.special && /^<2([\w-]+)>$/.exec(tag.text); // of a model of several directions
  if (to) parts.push('--to', to[1]);
  if (request.beam) parts.push('--beam', request.beam);
  if (typeof request.length_penalty === 'number') parts.push('--length-penalty', request.length_penalty);
  if (request.reference) parts.push('--reference', shellQuote(request.reference));
  if (request.off?.length && !extra.includes('--off')) parts.push('--off', request.off.join(','));
  return [...parts, ...extra, '--html explorer.html'].join(' ');
}

// Of `score.reference`, as the library judged it.
const STRIP_VERDICTS = { same: 'strip.same', equal: 'strip.equal', search_error: 'strip.search', model_error: 'strip.modelError' };

class StripPanel {
  constructor(body, context) {
    this.context = context;
    this.previous = null;
    this.comparison = null;
    this.parts = {
      texts: element('div', { class: 'texts', 'data-widget': 'strip' }),
      clock: element('div', { class: 'clock row' }),
      detail: element('div', { class: 'detail' }),
      compare: element('div', { class: 'compare', hidden: true }),
      reference: element('div', { class: 'reference', hidden: true }),
    };
    body.append(...Object.values(this.parts));
    this.buildDock(body.closest('main'));
    context.onExplanation((ex) => this.build(ex));
    context.store.subscribe((state, changed) => {
      const ex = context.current();
      if (ex && ex === this.ex && ['step', 'src', 'time'].some((key) => changed.has(key))) this.update(ex, state);
    });
    document.addEventListener('explorer:alternatives', () => this.focusAlternatives());
  }

  build(ex) {
    this.ex = ex;
    const { store } = this.context;
    const select = (key) => (button) => store.set({ [key]: Number(button.dataset.token) });
    const side = (name, key) => {
      const text = ex[name];
      const label = element('h3', { id: `strip-${name}` }, translate(`strip.${name}`));
      const language = stripLanguage(text.lang);
      if (language) label.append(element('span', { class: 'quiet' }, ` · ${language}`));
      const { run, items } = renderText(text, { prefix: name, decorate: () => {} });
      run.setAttribute('aria-labelledby', `strip-${name}`);
      const roving = rovingFocus(run, { items: () => items, rtl: () => text.dir === 'rtl', vertical: true, onMove: select(key) });
      run.addEventListener('click', (event) => {
        const button = event.target.closest('.tok');
        if (button) roving.focus(button);
      });
      run.addEventListener('keydown', (event) => {
        if (event.key !== 'Enter' && event.key !== ' ') return;
        event.preventDefault();
        select(key)(event.target);
      });
      return { items, roving, node: element('div', { class: `side ${name}` }, label, run) };
    };
    this.source = side('source', 'src');
    this.target = ex.hasClasses ? this.buildClasses(ex) : side('target', 'step');
    this.source.node.hidden = !ex.source.tokens.length;
    const legend = element('p', { class: 'legend' },
      element('span', { class: 'key' }, translate('strip.legend.bar')),
      element('span', { class: 'key low' }, translate('strip.legend.low')),
      ex.steps.some((step) => step.forced) ? element('span', { class: 'key forced' }, translate('strip.legend.forced')) : null,
      ex.sourceWeights(0) ? element('span', { class: 'key weight' }, translate('strip.legend.source')) : null);
    const cut = ex.missing?.text ? element('p', { class: 'cut' }, ex.missing.text) : null;
    this.parts.texts.replaceChildren(...[cut, this.source.node, this.target.node, legend].filter(Boolean));
    this.buildClock(ex);
    this.update(ex, store.get());
    this.showReference(ex);
    if (this.comparison && this.comparison.after !== ex && this.comparison.before !== ex) this.comparison = null;
    this.showComparison();
  }

  // The classes of a classifier with their probabilities.
  buildClasses(ex) {
    const chances = new Map((ex.steps[0]?.top ?? []).map(([id, , logprob]) => [id, Math.exp(logprob)]));
    const rows = ex.target.tokens.map((token) => {
      const p = chances.get(token.id) ?? null;
      return element('li', { class: token.id === ex.steps[0]?.id ? 'chosen' : '', var: { p: (p ?? 0).toFixed(4) } },
        element('bdi', {}, tokenLabel(token)), element('span', { class: 'number' }, p === null ? '–' : formatProbability(p)));
    });
    const heading = element('h3', { id: 'strip-target' }, translate('strip.target'));
    const list = element('ul', { class: 'classes', 'aria-labelledby': 'strip-target' }, rows);
    return { items: [], roving: { refresh() {}, focus() {} }, node: element('div', { class: 'side target' }, heading, list) };
  }

  buildClock(ex) {
    this.parts.clock.hidden = ex.steps.length < 2;
    const { store } = this.context;
    const move = (by) => {
      const at = store.get().step ?? 0;
      store.set({ step: Math.max(0, Math.min(ex.steps.length - 1, at + by)) });
      this.context.announce(targetName(ex, store.get().step));
    };
    this.back = element('button', { type: 'button', 'aria-label': translate('strip.back'), onclick: () => move(-1) }, '←');
    this.forward = element('button', { type: 'button', 'aria-label': translate('strip.forward'), onclick: () => move(1) }, '→');
    this.where = element('span', { class: 'number' });
    this.timeBox = element('input', { type: 'checkbox', onchange: () => store.set({ time: this.timeBox.checked }) });
    this.parts.clock.replaceChildren(
      this.back, this.where, this.forward,
      element('label', { class: 'check' }, this.timeBox, translate('strip.time')),
    );
  }

  // The selected token in one line at the foot of the window, while the text itself is out of sight.
  buildDock(main) {
    const step = (by) => () => this[by < 0 ? 'back' : 'forward'].click();
    this.dock = {
      bar: element('div', { class: 'dock', role: 'group', hidden: true }),
      back: element('button', { type: 'button', onclick: step(-1) }, '←'),
      forward: element('button', { type: 'button', onclick: step(1) }, '→'),
      text: element('button', { type: 'button', class: 'plain text', onclick: () => this.context.visit('strip') }),
    };
    const { bar, back, text, forward } = this.dock;
    bar.append(back, text, forward);
    main.append(bar);
    new IntersectionObserver(([entry]) => {
      bar.hidden = entry.isIntersecting || entry.boundingClientRect.top > 0 || !this.ex?.steps.length;
    }).observe(this.parts.texts);
  }

  showDock(ex, t) {
    const { bar, back, text, forward } = this.dock;
    bar.setAttribute('aria-label', translate('strip.dock'));
    back.setAttribute('aria-label', translate('strip.back'));
    forward.setAttribute('aria-label', translate('strip.forward'));
    [back.disabled, forward.disabled] = [this.back.disabled, this.forward.disabled];
    const weights = ex.sourceWeights(t);
    text.replaceChildren(
      quoted(ex.hasClasses ? tokenLabel(ex.outputToken(t)) : stripWordOf(ex.target, t), ex.target.lang || null),
      ` ${formatProbability(Math.exp(ex.steps[t]?.logprob ?? 0))}`,
      ...(weights && weights.strongest >= 0 ? [' ← ', quoted(stripWordOf(ex.source, weights.strongest), ex.source.lang || null)] : []),
      element('span', { class: 'quiet' }, ` · ${this.where.textContent}`),
    );
  }

  update(ex, state) {
    const t = state.step ?? 0;
    const weights = ex.sourceWeights(t);
    const most = weights ? Math.max(...weights.values, 1e-9) : 1;
    this.target.items.forEach((button, index) => {
      button.toggleAttribute('aria-current', index === state.step);
      if (index === state.step) button.setAttribute('aria-current', 'true');
      const later = state.time && index > t;
      if (button.dataset.later === String(later)) return;
      const step = ex.steps[index];
      const p = step ? Math.exp(step.logprob) : 0;
      setAttributes(button, {
        'data-later': String(later),
        'aria-label': later
          ? translate('strip.nameLater', { at: index + 1, count: ex.target.tokens.length })
          : step ? targetName(ex, index) : tokenLabel(ex.target.tokens[index]),
        var: { p: later ? 0 : p.toFixed(4) },
      });
      button.classList.toggle('low', !later && p < 0.5);
      button.classList.toggle('forced', !later && Boolean(step?.forced));
      button.classList.toggle('later', later);
    });
    this.source.items.forEach((button, index) => {
      setAttributes(button, {
        'aria-current': index === state.src ? 'true' : null,
        'aria-label': stripSourceName(ex, index, state.step),
        var: { w: weights ? (weights.values[index] / most).toFixed(4) : 0 },
      });
      button.classList.toggle('strongest', weights?.strongest === index);
    });
    this.target.roving.refresh(this.target.items[t]);
    this.source.roving.refresh(this.source.items[state.src ?? Math.max(weights?.strongest ?? 0, 0)]);
    this.where.textContent = translate('strip.step', { at: t + 1, count: ex.steps.length });
    this.back.disabled = t === 0;
    this.forward.disabled = t >= ex.steps.length - 1;
    this.timeBox.checked = state.time;
    this.showDock(ex, t);
    this.showDetail(ex, t);
  }

  showDetail(ex, t) {
    const step = ex.steps[t];
    if (!step) {
      this.parts.detail.replaceChildren();
      return;
    }
    const sum = ex.steps.slice(0, t + 1).reduce((total, each) => total + each.logprob, 0);
    const fact = (key, value) => element('div', {}, element('dt', {}, translate(key)), element('dd', { class: 'number' }, value));
    const facts = element('dl', { class: 'facts' },
      fact('strip.probability', formatProbability(Math.exp(step.logprob))),
      fact('strip.rank', String(step.rank)),
      fact('strip.entropy', translate('strip.nats', { value: formatNumber(step.entropy) })),
      fact('strip.logprob', stripLog(step.logprob)),
      fact('strip.cumulative', stripLog(sum)));
    const left = element('div', { class: 'reading' }, this.readSentence(ex, t), facts);
    // Padding and the like are forbidden everywhere; more than that is worth a sentence.
    const usual = Math.min(...ex.steps.map((each) => each.masked ?? 0));
    if (step.masked > usual) left.append(element('p', { class: 'quiet' }, translate('strip.masked', { count: step.masked })));
    this.parts.detail.replaceChildren(left, ...(ex.hasClasses ? [] : [this.buildAlternatives(ex, t)]));
  }

  readSentence(ex, t) {
    const weights = ex.sourceWeights(t);
    if (!weights || weights.strongest < 0) return null;
    const token = quoted(ex.hasClasses ? tokenLabel(ex.outputToken(t)) : stripWordOf(ex.target, t), ex.target.lang || null);
    const source = quoted(stripWordOf(ex.source, weights.strongest), ex.source.lang || null);
    const part = formatPart(weights.values[weights.strongest]);
    const sentence = element('p', { class: 'answer' }, fill(translate(`strip.read.${weights.from}`), { token, source, part }));
    const head = ex.strongestHead(t);
    if (!head) return sentence;
    const open = () => {
      this.context.store.set({ site: head.site, head: head.head, src: head.src, zoom: null });
      this.context.visit('head');
    };
    sentence.append(' ', ...fill(translate('strip.readHead'), {
      head: element('strong', {}, head.name),
      weight: formatNumber(head.weight),
    }), ' ', element('button', { type: 'button', class: 'plain inline', onclick: open }, translate('strip.openHead')));
    return [sentence, this.disagreement(ex, t, weights)].filter(Boolean);
  }

  // Attribution and attention are two measures: where their strongest words differ, the page shows both.
  disagreement(ex, t, weights) {
    const mean = weights.from === 'attribution' && ex.crossSites().length ? ex.attentionMean(t) : null;
    const words = mean ? ex.source.words.map(([from, to]) => mean.slice(from, to).reduce((a, b) => a + b, 0)) : [];
    const best = words.indexOf(Math.max(...words));
    if (best >= 0 && (weights.strongest < ex.source.words[best][0] || weights.strongest >= ex.source.words[best][1])) {
      return element('p', { class: 'quiet' }, fill(translate('strip.readOther'), {
        source: quoted(stripWordOf(ex.source, ex.source.words[best][0]), ex.source.lang || null),
        part: formatPart(words[best]),
      }));
    }
    return null;
  }

  buildAlternatives(ex, t) {
    const step = ex.steps[t];
    const { api } = this.context;
    const options = step.top.map(([id, text, logprob], rank) => {
      const chosen = id === step.id;
      const ready = !api && ex.branches?.[`${t}:${id}`];
      const p = Math.exp(logprob);
      const note = chosen ? translate('strip.chosen') : ready ? translate('strip.ready') : '';
      return element('li', {
        role: 'option',
        tabindex: '-1',
        'aria-selected': chosen,
        'aria-label': [tokenLabel({ text }), formatProbability(p), note].filter(Boolean).join(', '),
        'data-id': id,
        var: { p: p.toFixed(4) },
      },
      element('span', { class: 'rank number' }, rank + 1),
      element('bdi', { class: 'alt', lang: ex.target.lang || null }, tokenLabel({ text })),
      element('span', { class: 'note' }, note),
      element('span', { class: 'number' }, formatProbability(p)));
    });
    const list = element('ul', { role: 'listbox', class: 'alternatives', 'aria-labelledby': 'strip-alternatives', 'data-widget': 'alternatives' }, options);
    const roving = rovingFocus(list, { items: () => options, vertical: true });
    const take = (option) => this.take(ex, t, Number(option.dataset.id));
    list.addEventListener('click', (event) => {
      const option = event.target.closest('[role="option"]');
      if (option) {
        roving.focus(option);
        take(option);
      }
    });
    list.addEventListener('keydown', (event) => {
      if (event.key === 'Enter' || event.key === ' ') {
        event.preventDefault();
        take(event.target);
      } else if (event.key === 'Escape') {
        event.preventDefault();
        this.target.roving.focus(this.target.items[t]);
      }
    });
    const hint = element('p', { class: 'quiet' }, translate(
      api ? 'strip.alternativesHint' : Object.keys(ex.branches ?? {}).length ? 'strip.alternativesFile' : 'strip.alternativesNone'));
    return element('div', { class: 'choices' },
      element('h3', { id: 'strip-alternatives' }, translate('strip.alternatives')), list, hint);
  }

  focusAlternatives() {
    const list = this.parts.detail.querySelector('[role="listbox"]');
    const option = list?.querySelector('[tabindex="0"]') ?? list?.querySelector('[role="option"]');
    option?.focus();
  }

  async take(ex, t, id) {
    const { api, context } = { api: this.context.api, context: this.context };
    if (id === ex.steps[t].id) return;
    let after;
    if (api) {
      try {
        this.parts.detail.setAttribute('aria-busy', 'true');
        context.announce(translate('page.loading'));
        after = decodeExplanation(await api.branch(t, id));
      } catch (error) {
        context.fail(error);
        return;
      } finally {
        this.parts.detail.removeAttribute('aria-busy');
      }
      this.comparison = { before: ex, after };
      context.replace(after);
      this.target.roving.focus(this.target.items[Math.min(t, this.target.items.length - 1)]);
    } else {
      const branch = ex.branches?.[`${t}:${id}`];
      if (!branch) return;
      after = branch;
      this.comparison = { before: ex, after };
      this.showComparison();
    }
    context.announce(this.summary());
  }

  summary() {
    const { before, after } = this.comparison;
    const ids = (side) => side.target.tokens.map((token) => token.id);
    const { marks } = compareTokens(ids(before), ids(after));
    return translate('strip.summary', {
      changed: marks.filter((mark) => mark !== 'kept').length,
      count: marks.length,
      before: stripLog(before.score?.sum),
      after: stripLog(after.score?.sum),
    });
  }

  showComparison() {
    const box = this.parts.compare;
    box.hidden = !this.comparison;
    if (!this.comparison) return;
    const { before, after } = this.comparison;
    const ids = (side) => side.target.tokens.map((token) => token.id);
    const { marks, stayed } = compareTokens(ids(before), ids(after));
    const line = (key, side, mark) => {
      const run = element('bdi', { class: 'run small', dir: side.target.dir || 'auto', lang: side.target.lang || null });
      renderText(side.target, {
        prefix: `compare-${key}`,
        decorate: () => {},
      }).run.childNodes.forEach((node) => {
        if (node.nodeType === 3) run.append(node.textContent);
        else {
          const index = Number(node.firstChild.dataset.token);
          const tag = mark(index);
          const label = node.firstChild.dataset.label;
          run.append(element(tag === 'kept' ? 'span' : tag === 'gone' ? 'del' : 'ins', { class: tag, 'data-label': label ?? null }, node.textContent));
        }
      });
      return element('div', {}, element('h4', {}, translate(`strip.${key}`)), run);
    };
    const close = () => {
      this.comparison = null;
      this.showComparison();
      this.target.roving.focus(this.target.items[this.context.store.get().step ?? 0]);
    };
    const undo = () => {
      this.comparison = null;
      this.context.replace(before);
    };
    const isNow = this.context.current() === after;
    box.replaceChildren(
      element('h3', {}, translate('strip.changed')),
      element('p', { class: 'answer' }, this.summary()),
      line('before', before, (index) => (stayed[index] ? 'kept' : 'gone')),
      line('after', after, (index) => marks[index]),
      element('p', { class: 'legend' },
        element('span', { class: 'key changed' }, translate('strip.mark.changed')),
        element('span', { class: 'key new' }, translate('strip.mark.new'))),
      element('div', { class: 'row' },
        isNow ? element('button', { type: 'button', onclick: undo }, translate('strip.undo')) : null,
        element('button', { type: 'button', class: 'plain', onclick: close }, translate('strip.dismiss'))),
    );
  }

  showReference(ex) {
    const box = this.parts.reference;
    const reference = ex.request?.reference;
    const given = ex.score?.reference;
    box.hidden = !reference || !given;
    if (box.hidden) return;
    const own = ex.score.own ?? ex.nbest?.[0] ?? ex.score;
    const scores = { reference: formatScore(given.normalised), own: formatScore(own.normalised) };
    const isCut = given.verdict === 'search_error' && given.normalised <= own.normalised;
    const key = isCut ? 'strip.cut' : STRIP_VERDICTS[given.verdict] ?? 'strip.equal';
    box.replaceChildren(...[
      element('h3', {}, translate('strip.reference')),
      element('p', { class: 'answer' }, translate(key, scores)),
      ex.nbest?.[0]?.text ? element('p', {}, translate('strip.own'), ' ', quoted(ex.nbest[0].text, ex.target.lang || null)) : null,
    ].filter(Boolean));
  }
}

export function mountStrip(body, context) {
  return new StripPanel(body, context);
}
