// What a served page can ask its model; null in a file.
import { decodeExplanation } from './data.js';
import { byId } from './dom.js';
import { translate } from './i18n.js';

async function apiCall(path, body) {
  const response = await fetch(new URL(`api/${path}`, document.baseURI), body && {
    method: 'POST',
    headers: { 'Content-Type': 'application/json' },
    body: JSON.stringify(body),
  }).catch(() => {
    throw new Error(translate('page.gone'));
  });
  if (response.ok) return response;
  // Where the answer is not JSON, the status line is all there is.
  const { error } = await response.json().catch(() => ({}));
  throw new Error(error ?? `${response.status} ${response.statusText}`);
}

function createApi() {
  let here = '';
  const json = async (path, body) => (await apiCall(path, body)).json();
  const explanation = async (path, body) => decodeExplanation(await json(path, body));
  return {
    session: () => json('session'),
    load: (digest) => explanation(`e/${encodeURIComponent(digest)}`),
    // The explanation that the calls below are about.
    use(digest) {
      here = `e/${encodeURIComponent(digest)}/`;
    },
    explain: (request) => explanation('explain', request),
    branch: (step, token) => explanation(`${here}branch`, { step, token }),
    off: (heads) => json(`${here}off`, { heads }),
    attribute: (method, step) => json(`${here}attribute`, { method, step }),
    // Exact effect of every head, one call of onHead(name, exact) as each line of JSON arrives.
    async effects(onHead) {
      const { body } = await apiCall(`${here}effects`, {});
      const reader = body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = '';
      for (let done = false; !done;) {
        const part = await reader.read();
        done = part.done;
        const lines = (rest + (part.value ?? '')).split('\n');
        rest = done ? '' : lines.pop();
        for (const line of lines.filter(Boolean)) {
          const { head, exact, error } = JSON.parse(line);
          if (error) throw new Error(error);
          onHead(head, exact);
        }
      }
    },
    // Exact weights of one head, row by row: {data: Float32Array}.
    async tensor(name, h, q, k) {
      const query = `h=${h}&q=${q.join('-')}&k=${k.join('-')}`;
      const response = await apiCall(`${here}tensor/${encodeURIComponent(name)}?${query}`);
      return { data: new Float32Array(await response.arrayBuffer()) };
    },
  };
}

export const api = byId('explanation') ? null : createApi();
