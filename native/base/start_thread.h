// Threads of the core take no signals: those belong to the program that embeds it. SIGBUS of their
// own they do: what was blocked would end the process (lost_pages.h).
#pragma once

#include <pthread.h>

#include <csignal>
#include <functional>
#include <thread>

namespace kvw {

// `name` shows in top and debuggers; at most 15 characters. Throws std::system_error where the
// process may have no more threads.
inline std::thread start_thread(const char* name, std::function<void()> body) {
  sigset_t all, before;
  sigfillset(&all);
  sigdelset(&all, SIGBUS);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread;
  try {
    thread = std::thread(std::move(body));
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread.native_handle(), name);
  return thread;
}

}  // namespace kvw
