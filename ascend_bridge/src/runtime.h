// The process's connection to CANN or to the simulator: libraries, version, devices, operators.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "device.h"
#include "groups.h"
#include "handles.h"
#include "loader.h"
#include "operators.h"

namespace deepinfer::ascend {

struct RuntimeOptions {
  LoaderOptions loader;
  DeviceOptions device;
  int64_t determinism = -1;  // CANN's determinism level; -1 leaves it alone
};

struct ResolvedOperator {
  void* phase_one;
  void* phase_two;
};

class Runtime {
 public:
  // Loads, initialises and counts devices. Throws when nothing is found or no device is there.
  explicit Runtime(const RuntimeOptions& options);
  ~Runtime();

  // The runtime of the process; throws FAILED_PRECONDITION before `Open`. A second `Open` throws as well.
  static Runtime& Get();
  static void Open(const RuntimeOptions& options);
  static bool IsOpen();
  static void Close();

  Device& device(int32_t ordinal);
  HandleTable& handles(int32_t ordinal);
  int32_t num_devices() const { return static_cast<int32_t>(devices_.size()); }
  Libraries& libraries() { return libraries_; }
  Groups& groups() { return *groups_; }
  const std::string& version() const { return version_; }
  const std::string& soc_name() const { return soc_name_; }

  // Both phases of an operator; throws UNIMPLEMENTED with the operator, the version and the reason.
  ResolvedOperator Resolve(const char* name);
  // Why the operator cannot be used, or "" when it can.
  std::string WhyNot(const std::string& name);

 private:
  void Start();
  std::string ReadVersion();
  void Refuse(int32_t status, const std::string& call);

  RuntimeOptions options_;
  Libraries libraries_;
  std::string version_;
  std::string soc_name_;
  std::vector<std::unique_ptr<Device>> devices_;
  std::vector<std::unique_ptr<HandleTable>> handles_;
  std::unique_ptr<Groups> groups_;
};

}  // namespace deepinfer::ascend
