// How a status of CANN becomes one of XLA's, and the exception that carries it inside the bridge.
#pragma once

#include <stdexcept>
#include <string>

#include "acl_min.h"

namespace deepinfer::ascend {

// The numbers are those of XLA's (and gRPC's) status codes.
enum class Code : int32_t {
  kOk = 0,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kNotFound = 5,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kAborted = 10,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,
  kDataLoss = 15,
};

struct StatusClass {
  Code code;
  bool dirties_device;  // the device refuses further work until it is reset
};

// The class of a runtime or operator status (spec: ascend 3.4). A status that is not in the table is internal.
StatusClass Classify(int32_t status);

// The same for a result of the library of collectives.
Code ClassifyCollective(int32_t result);

class BridgeError : public std::runtime_error {
 public:
  BridgeError(Code code, const std::string& text) : std::runtime_error(text), code_(code) {}
  Code code() const { return code_; }

 private:
  Code code_;
};

}  // namespace deepinfer::ascend
