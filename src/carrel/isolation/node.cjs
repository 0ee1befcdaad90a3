// Node reads the proxy variables only from versions 22.21 and 24 on. Loaded before a program by NODE_OPTIONS, this has
// the fetch, http and https of older ones open a tunnel through the proxy that the variables name.
"use strict";

const [major, minor] = process.versions.node.split(".").map(Number);
if (major >= 24 || (major === 22 && minor >= 21)) return;

const http = require("node:http");
const https = require("node:https");

const bare = (host) => (host || "localhost").replace(/^\[|\]$/g, "").toLowerCase();

function proxyFor(secure, host) {
  const env = process.env;
  const without = (env.no_proxy ?? env.NO_PROXY ?? "").toLowerCase().split(/[\s,]+/).filter(Boolean);
  if (without.some((name) => name === "*" || name === host || host.endsWith("." + name.replace(/^\*?\./, "")))) return null;
  const given = secure ? env.https_proxy || env.HTTPS_PROXY : env.http_proxy || env.HTTP_PROXY;
  return given && given.startsWith("http://") ? new URL(given) : null;
}

function tunnel(proxy, host, port, done) {
  const target = `${host.includes(":") ? `[${host}]` : host}:${port}`;
  const options = { host: bare(proxy.hostname), port: proxy.port || 80, method: "CONNECT", path: target, agent: false };
  const request = http.request({ ...options, headers: { host: target } });
  request.once("error", done);
  request.once("connect", (answer, socket, head) => {
    if (answer.statusCode === 200) return done(null, socket);
    socket.destroy();
    const said = head.toString("utf8", 0, 2000).trim();
    done(new Error(`the proxy answered ${answer.statusCode} ${answer.statusMessage} for ${target}${said ? `: ${said}` : ""}`));
  });
  request.end();
}

// Opens a connection for whoever wants one: `done(error, socket)`. False when it is not for the proxy.
function open(secure, options, done) {
  const host = bare(options.hostname || options.host);
  const proxy = options.socketPath ? null : proxyFor(secure, host);
  if (!proxy) return false;
  tunnel(proxy, host, options.port || (secure ? 443 : 80), (error, socket) => {
    if (error || !secure) return done(error, socket);
    const servername = options.servername || (require("node:net").isIP(host) ? "" : host);
    const safe = require("node:tls").connect({ ...options, host, path: undefined, socket, servername });
    safe.once("error", done);
    safe.once("secureConnect", () => {
      safe.removeListener("error", done);
      done(null, safe);
    });
  });
  return true;
}

for (const [module, secure] of [[http, false], [https, true]]) {
  const agent = module.globalAgent;
  const direct = agent.createConnection;
  agent.createConnection = function (options, done) {
    return open(secure, options, done) ? undefined : direct.call(this, options, done);
  };
}

const DISPATCHER = Symbol.for("undici.globalDispatcher.1");
const fetch = globalThis.fetch;
let ready = false;

// What is behind fetch is loaded when it is first used, and only then has a class to make another of.
function prepare() {
  ready = true;
  void globalThis.Request;
  const Agent = globalThis[DISPATCHER]?.constructor;
  if (!Agent) return;
  const direct = globalThis[DISPATCHER];
  const proxied = new Agent({
    connect(options, done) {
      const secure = options.protocol === "https:";
      const more = secure ? { ...options, ALPNProtocols: ["http/1.1"] } : options;
      if (!open(secure, more, done)) done(new Error("not for the proxy"));
    },
  });
  const dispatch = direct.dispatch.bind(direct);
  direct.dispatch = (options, handler) => {
    const origin = new URL(options.origin);
    const there = proxyFor(origin.protocol === "https:", bare(origin.hostname)) ? proxied.dispatch.bind(proxied) : dispatch;
    return there(options, handler);
  };
}

if (fetch) {
  const { fetch: named } = {
    fetch(...given) {
      if (!ready) prepare();
      return fetch.apply(this, given);
    },
  };
  Object.defineProperty(globalThis, "fetch", { value: named, writable: true, enumerable: true, configurable: true });
}
