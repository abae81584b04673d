// Repositories: what can be done with one without a clone.
import { assert, call, fails } from './registry.js'

const text = (content) => Buffer.from(content.content, 'base64').toString()

call('git.repos.create', async (y) => {
  const { repoId, repo } = await y.fs.git.repos.create({})
  assert.match(repoId, /^[a-z0-9-]+$/)
  ;[y.repoId, y.repo] = [repoId, repo]
})

call('git.repos.create: import of files', async (y) => {
  const { repo } = await y.fs.git.repos.create({
    name: `imported-${process.pid}`,
    public: true,
    import: { type: 'files', files: { 'a.txt': 'a\n', 'src/b.ts': 'b\n' }, commitMessage: 'First', authorName: 'Ada' },
  })
  assert.equal(text(await repo.contents.get({ path: 'src/b.ts' })), 'b\n')
  y.imported = repo
})

call('git.repos.create: a name that is taken', async (y) => {
  await fails('REPO_ALREADY_EXISTS', () => y.fs.git.repos.create({ name: `imported-${process.pid}` }))
})

call('git.repos.create: source that is not there', async (y) => {
  await fails('SOURCE_NOT_FOUND', () => y.fs.git.repos.create({ source: { url: 'https://nothing.invalid/nothing.git' } }))
})

call('git.repos.create: source on the host itself', async (y) => {
  await fails('FORBIDDEN', () => y.fs.git.repos.create({ source: { url: 'http://127.0.0.1:9/nothing.git' } }))
})

call('commits.create', async (y) => {
  const { commit } = await y.repo.commits.create({
    message: 'First',
    branch: 'main',
    files: [
      { path: 'README.md', content: '# Title\n\nneedle here\n' },
      { path: 'src/app.ts', content: 'export const n = 1\n' },
      { path: 'bytes', content: Buffer.from([0, 255]).toString('base64'), encoding: 'base64' },
    ],
    author: { name: 'Ada', email: 'ada@example.com' },
  })
  assert.deepEqual([commit.message.trim(), commit.author.name, commit.parents], ['First', 'Ada', []])
  y.first = commit.sha
})

call('commits.create: change and delete', async (y) => {
  const { commit } = await y.repo.commits.create({
    message: 'Second: a needle moves',
    branch: 'main',
    files: [{ path: 'src/app.ts', content: 'export const n = 2 // needle\n' }, { path: 'bytes', deleted: true }],
    expectedSha: y.first,
  })
  assert.deepEqual(commit.parents.map((one) => one.sha), [y.first])
  y.second = commit.sha
})

call('commits.create: expectedSha', async (y) => {
  await fails('CONFLICTING_PARENT', () => y.repo.commits.create({
    message: 'Late', branch: 'main', files: [{ path: 'x', content: 'x' }], expectedSha: y.first,
  }))
})

call('commits.create: another branch', async (y) => {
  await y.repo.commits.create({ message: 'Aside', branch: 'feature/x', files: [{ path: 'aside', content: 'x' }] })
})

call('commits.get', async (y) => {
  assert.equal((await y.repo.commits.get({ sha: y.second })).sha, y.second)
  await fails('COMMIT_NOT_FOUND', () => y.repo.commits.get({ sha: '0'.repeat(40) }))
})

call('commits.list', async (y) => {
  const found = await y.repo.commits.list()
  assert.deepEqual(found.commits.map((one) => one.sha), [y.second, y.first])
})

call('commits.list: order, limit', async (y) => {
  const found = await y.repo.commits.list({ branch: 'main', order: 'asc', limit: 1 })
  assert.deepEqual(found.commits.map((one) => one.sha), [y.first])
})

call('commits.list: since', async (y) => {
  const found = await y.repo.commits.list({ branch: 'main', since: y.first })
  assert.deepEqual(found.commits.map((one) => one.sha), [y.second])
})

call('branches.list', async (y) => {
  const { branches } = await y.repo.branches.list()
  assert.deepEqual(branches.map((one) => one.name).sort(), ['feature/x', 'main'])
})

call('branches.get', async (y) => {
  assert.equal((await y.repo.branches.get({ branchName: 'main' })).sha, y.second)
  assert.match((await y.repo.branches.get({ branchName: 'feature/x' })).sha, /^[0-9a-f]{40}$/)
})

call('branches.get: missing', async (y) => {
  await fails('BRANCH_NOT_FOUND', () => y.repo.branches.get({ branchName: 'nothing' }))
})

// Every client so far loses the name; it must be told so in a word it knows.
call('branches.create: the name is lost in the client', async (y) => {
  await fails('BRANCH_NAME_EMPTY', () => y.repo.branches.create({ name: 'new', sha: y.first }))
})

call('branches.getDefaultBranch', async (y) => {
  assert.equal((await y.repo.branches.getDefaultBranch()).defaultBranch, 'main')
})

call('branches.setDefaultBranch', async (y) => {
  await y.repo.branches.setDefaultBranch({ defaultBranch: 'feature/x' })
  assert.equal((await y.repo.branches.getDefaultBranch()).defaultBranch, 'feature/x')
  await y.repo.branches.setDefaultBranch({ defaultBranch: 'main' })
})

call('tags.list', async (y) => {
  assert.deepEqual((await y.repo.tags.list()).tags, [])
})

call('tags.get: missing', async (y) => {
  await fails('TAG_NOT_FOUND', () => y.repo.tags.get({ tagName: 'v1' }))
})

call('tags.getByHash: missing', async (y) => {
  await fails('TAG_NOT_FOUND', () => y.repo.tags.getByHash({ sha: y.first }))
})

call('contents.get: file', async (y) => {
  const found = await y.repo.contents.get({ path: 'src/app.ts', rev: y.first })
  assert.deepEqual([found.type, found.name, text(found)], ['file', 'app.ts', 'export const n = 1\n'])
})

call('contents.get: directory', async (y) => {
  const found = await y.repo.contents.get({ path: '' })
  assert.deepEqual([found.type, found.entries.map((one) => one.name)], ['dir', ['README.md', 'src']])
})

call('contents.get: missing', async (y) => {
  await fails('PATH_NOT_FOUND', () => y.repo.contents.get({ path: 'nothing' }))
})

call('contents.downloadTarball', async (y) => {
  const bytes = new Uint8Array(await y.repo.contents.downloadTarball())
  assert.deepEqual([...bytes.slice(0, 2)], [0x1f, 0x8b])
})

call('contents.downloadZip', async (y) => {
  const bytes = new Uint8Array(await y.repo.contents.downloadZip({ rev: 'main' }))
  assert.equal(Buffer.from(bytes.slice(0, 2)).toString(), 'PK')
})

call('trees.get', async (y) => {
  const { tree } = await y.repo.commits.get({ sha: y.second })
  const found = await y.repo.trees.get({ sha: tree.sha })
  assert.deepEqual(found.tree.map((one) => [one.path, one.type]), [['README.md', 'blob'], ['src', 'tree']])
  y.blobSha = found.tree[0].sha
})

call('blobs.get', async (y) => {
  assert.equal(text(await y.repo.blobs.get({ sha: y.blobSha })), '# Title\n\nneedle here\n')
  await fails('BLOB_NOT_FOUND', () => y.repo.blobs.get({ sha: '0'.repeat(40) }))
})

call('repo.compare', async (y) => {
  const found = await y.repo.compare({ base: y.first, head: y.second })
  assert.deepEqual([found.status, found.ahead_by, found.behind_by], ['ahead', 1, 0])
  assert.deepEqual(found.files.map((one) => [one.filename, one.status]).sort(), [['bytes', 'removed'], ['src/app.ts', 'modified']])
})

call('repo.search', async (y) => {
  const found = await y.repo.search({ query: 'needle' })
  assert.deepEqual(found.files.map((one) => one.path).sort(), ['README.md', 'src/app.ts'])
  assert.equal(found.files[0].matches[0].line.includes('needle'), true)
})

call('repo.search: pathPattern, isRegex', async (y) => {
  const found = await y.repo.search({ query: 'n.+le', isRegex: true, pathPattern: '*.md', rev: 'main' })
  assert.deepEqual(found.files.map((one) => one.path), ['README.md'])
})

call('repo.searchFiles', async (y) => {
  assert.deepEqual((await y.repo.searchFiles({ query: 'app' })).files.map((one) => one.path), ['src/app.ts'])
})

call('repo.searchCommits', async (y) => {
  const found = await y.repo.searchCommits({ query: 'moves' })
  assert.deepEqual(found.commits.map((one) => one.sha), [y.second])
})

call('repo.searchDiffs', async (y) => {
  const found = await y.repo.searchDiffs({ query: '// needle' })
  assert.equal(found.commits[0].files[0].matches[0].isAddition, true)
})

call('triggers.create', async (y) => {
  const { triggerId } = await y.repo.triggers.create({
    trigger: { event: 'push', branches: ['main'], globs: ['src/**'] },
    action: { action: 'webhook', endpoint: 'https://example.com/hook' },
  })
  assert.match(triggerId, /./)
  y.triggerId = triggerId
})

call('triggers.list', async (y) => {
  const [one] = (await y.repo.triggers.list()).triggers
  assert.deepEqual(one.trigger, { event: 'push', branches: ['main'], globs: ['src/**'] })
  assert.deepEqual([one.id, one.action.endpoint], [y.triggerId, 'https://example.com/hook'])
})

call('triggers.delete', async (y) => {
  await y.repo.triggers.delete({ triggerId: y.triggerId })
  assert.deepEqual((await y.repo.triggers.list()).triggers, [])
})

call('githubSync.get: not configured', async (y) => {
  assert.equal(await y.repo.githubSync.get(), null)
})

call('githubSync.enable', async (y) => {
  await y.repo.githubSync.enable({ githubRepoName: 'example/app' })
  assert.equal((await y.repo.githubSync.get()).githubRepoName, 'example/app')
})

call('githubSync.disable', async (y) => {
  await y.repo.githubSync.disable()
  assert.equal(await y.repo.githubSync.get(), null)
})

call('git.repos.list', async (y) => {
  const found = await y.fs.git.repos.list({ limit: 50 })
  const one = found.repositories.find((repo) => repo.id === y.repoId)
  assert.equal(one.branches.main.target, y.second)
  assert(found.total >= 2)
})

call('git.repos.ref', async (y) => {
  const repo = y.fs.git.repos.ref({ repoId: y.repoId })
  assert.equal((await repo.branches.getDefaultBranch()).defaultBranch, 'main')
})
