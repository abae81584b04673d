// The list of calls, and what they share.
import assert from 'node:assert/strict'

export { assert }

// In the order they run: name, oldest version that has it, what is checked, and whether only a real machine can show it.
export const CALLS = []

export function call(name, check, { since = '2.7', vm = false } = {}) {
  assert(!CALLS.some(([known]) => known === name), name)
  CALLS.push([name, since, check, vm])
}

// What the calls share: the package, one sandbox, and a directory in it.
export class Yard {
  constructor(e2b) {
    this.e2b = e2b
    this.dir = process.env.COMPAT_DIR
    // A shell of a login reads what the owner of this machine has in their home: not that of a test.
    this.envs = process.env.COMPAT_VM ? {} : { HOME: this.dir }
    this.metadata = { purpose: 'test & more', run: String(process.hrtime.bigint()) }
    this.sbx = null
  }

  path(name) {
    return `${this.dir}/${name}`
  }
}

export async function fails(kind, work, text = '') {
  try {
    await work()
  } catch (error) {
    assert(error instanceof kind, `${error?.constructor?.name} instead of ${kind.name}: ${error}`)
    assert(String(error.message).includes(text), `${text} is not in ${error.message}`)
    return error
  }
  throw new Error(`${kind.name} was not thrown`)
}

export async function until(condition, seconds = 10) {
  const end = Date.now() + seconds * 1000
  while (!(await condition())) {
    assert(Date.now() < end, 'it did not come true in time')
    await new Promise((done) => setTimeout(done, 20))
  }
}
