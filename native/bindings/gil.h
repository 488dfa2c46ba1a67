// Without the GIL, and back to it while Python ends.
#pragma once

#include <Python.h>

namespace kvw::bindings {

// Around calls into Python that may wait for the GIL. Before 3.14 Python ends a daemon thread that
// asks for it once the interpreter is being taken down: it unwinds the thread's stack, where any
// noexcept frame ends the process, and destructors would touch objects without the GIL. A thread
// that is unwound through this stays in it for good, as 3.14 has it.
class StaysIfUnwound {
 public:
  StaysIfUnwound() = default;
  ~StaysIfUnwound();
  StaysIfUnwound(const StaysIfUnwound&) = delete;
  StaysIfUnwound& operator=(const StaysIfUnwound&) = delete;
  void returned() { returned_ = true; }

 private:
  bool returned_ = false;
};

// Gives the GIL up for as long as it lives; for nb::call_guard too. nb::gil_scoped_release comes
// back in a noexcept frame, which ends the process from a thread that Python ends.
class WithoutGil {
 public:
  WithoutGil() : thread_(PyEval_SaveThread()) {}
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* thread_;
};

}  // namespace kvw::bindings
