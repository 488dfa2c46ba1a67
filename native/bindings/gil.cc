#include "bindings/gil.h"

#include <unistd.h>

namespace kvw::bindings {

namespace {

// A frame of its own, below every noexcept one: an unwinding ends here.
[[gnu::noinline]] void come_back(PyThreadState* thread) {
  StaysIfUnwound call;
  PyEval_RestoreThread(thread);
  call.returned();
}

}  // namespace

StaysIfUnwound::~StaysIfUnwound() {
  while (!returned_) pause();
}

WithoutGil::~WithoutGil() { come_back(thread_); }

}  // namespace kvw::bindings
