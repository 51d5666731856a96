// Running text whose tokens can be selected: never chips, so Arabic joins, Chinese flows and marks stay on their letters.
import { make, setAttributes } from './dom.js';

// UTF-16 offsets of all code points, and the length.
function textOffsets(text) {
  let end = 0;
  return [0, ...Array.from(text, (character) => (end += character.length))];
}

// The next border between graphemes at or after each UTF-16 offset: no cut falls inside one.
function textBorders(text) {
  const next = new Uint32Array(text.length + 1).fill(text.length);
  for (const { index } of new Intl.Segmenter().segment(text)) next[index] = index;
  for (let i = text.length - 1; i >= 0; i--) if (next[i] === text.length && i) next[i] = Math.min(next[i + 1], text.length);
  next[0] = 0;
  return next;
}

// [start, end) in UTF-16 units of every token, moved to grapheme borders; white space before a token is not part of it.
function tokenRanges(side) {
  const { text, tokens } = side;
  const offsets = textOffsets(text);
  const borders = textBorders(text);
  let last = 0;
  return tokens.map((token) => {
    const [a, b] = token.span.map((at) => borders[offsets[Math.min(at, offsets.length - 1)]]);
    const from = Math.max(a, last);
    const end = Math.max(b, from);
    last = end;
    const blank = /^\s*/u.exec(text.slice(from, end))[0].length;
    const start = blank < end - from ? from + blank : from;
    return [start, end];
  });
}

// How a token is written in a sentence about it: without its space, specials and lone spaces by a sign.
export function tokenLabel(token) {
  const trimmed = token.text.trim();
  return trimmed || (token.text ? '␣' : '∅');
}

// A paragraph with one inline button per token, `prefix-index`: {run, items}.
// Its textContent is exactly the text: labels of specials are drawn by the style sheet from data-label.
export function renderText(side, prefix) {
  const ranges = tokenRanges(side);
  const run = make('bdi.run', { dir: side.dir || 'auto', lang: side.lang || null, role: 'list' });
  const items = [];
  let at = 0;
  ranges.forEach(([start, end], index) => {
    if (start > at) run.append(side.text.slice(at, start));
    const button = make('span.tok', { role: 'button', id: `${prefix}-${index}`, 'data-token': index });
    if (end > start) button.append(side.text.slice(start, end));
    const token = side.tokens[index];
    if (token.special || end === start) {
      setAttributes(button, { 'data-label': /^<0x..>$/.test(token.text) ? token.text.slice(3, 5) : tokenLabel(token) });
    }
    items.push(button);
    run.append(make('span', { role: 'listitem' }, button));
    at = Math.max(at, end);
  });
  if (at < side.text.length) run.append(side.text.slice(at));
  return { run, items };
}

// A short piece of text of unknown direction inside a sentence of ours.
export const quoted = (text, lang = null) => make('span.quoted', make('bdi', { lang }, text));

export const graphemes = (text) => Array.from(new Intl.Segmenter().segment(text), (each) => each.segment);

// The beginning of a long text.
export function shortened(text) {
  const clusters = graphemes(text);
  return clusters.length > 120 ? `${clusters.slice(0, 100).join('')}…` : text;
}

// A sentence with elements in it: fill("{a} was read from {b}", {a: node, b: node}).
export function fill(sentence, parts) {
  return sentence.split(/(\{\w+\})/).map((piece) => {
    const name = /^\{(\w+)\}$/.exec(piece)?.[1];
    return name && name in parts ? parts[name] : piece;
  });
}

// Longest common subsequence of two id lists: for each new token "kept", "changed" (in place of another) or "new";
// for each old one whether it stayed.
export function compareTokens(before, after) {
  const rows = before.length;
  const columns = after.length;
  const table = Array.from({ length: rows + 1 }, () => new Uint32Array(columns + 1));
  for (let i = rows - 1; i >= 0; i--) {
    for (let j = columns - 1; j >= 0; j--) {
      table[i][j] = before[i] === after[j] ? table[i + 1][j + 1] + 1 : Math.max(table[i + 1][j], table[i][j + 1]);
    }
  }
  const marks = [];
  const stayed = new Array(rows).fill(false);
  let [i, j] = [0, 0];
  while (i < rows || j < columns) {
    if (i < rows && j < columns && before[i] === after[j]) {
      stayed[i++] = true;
      marks[j++] = 'kept';
      continue;
    }
    // A stretch between two kept tokens: pair old with new, what is over is new.
    let [lost, added] = [0, 0];
    while ((i < rows || j < columns) && !(i < rows && j < columns && before[i] === after[j])) {
      if (j >= columns || (i < rows && table[i + 1][j] >= table[i][j + 1])) {
        lost++;
        i++;
      } else {
        marks[j++] = added++ < lost ? 'changed' : 'new';
      }
    }
    for (let k = 0; k < Math.min(lost, added); k++) marks[j - added + k] = 'changed';
  }
  return { marks, stayed };
}
