// The core's one exception. The bindings turn it into the Python tree of kvwarehouse/errors.py:
// `kind` picks the class, `code` is stable for programs, the message is for people and says what
// happened, to what value, and what to do.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace kvw {

enum class ErrorKind { usage, capacity, pin, storage, transport, internal };
const char* kind_name(ErrorKind kind);
// internal for a name that is none.
ErrorKind kind_from(std::string_view name);

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, std::string code, const std::string& message)
      : std::runtime_error(message), kind_(kind), code_(std::move(code)) {}

  ErrorKind kind() const { return kind_; }
  const std::string& code() const { return code_; }

 private:
  ErrorKind kind_;
  std::string code_;
};

// An Error of kind storage whose message ends in strerror(err).
Error storage_error(const std::string& what, int err);

}  // namespace kvw
