#include "runtime.h"

#include <cctype>
#include <fstream>

namespace deepinfer::ascend {
namespace {

constexpr const char* kCustomLibrary = "libcust_opapi";
constexpr size_t kVersionTextBytes = 128;

std::unique_ptr<Runtime>& TheRuntime() {
  static auto* const runtime = new std::unique_ptr<Runtime>;  // never destroyed: streams may outlive static storage
  return *runtime;
}

// The first word of a file, split at blanks and "=", that begins like "9.2", or "".
std::string VersionIn(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  for (int c = file.get(); file; c = file.get()) {
    if (!std::isspace(c) && c != '=') {
      word += static_cast<char>(c);
      continue;
    }
    if (MajorMinor(word).first >= 0) return word;
    word.clear();
  }
  return MajorMinor(word).first >= 0 ? word : "";
}

}  // namespace

Runtime::Runtime(const RuntimeOptions& options) : options_(options), libraries_(options.loader) {
  Refuse(libraries_.api().aclInit(nullptr), "aclInit");
  try {
    Start();
  } catch (const BridgeError&) {
    libraries_.api().aclFinalize();
    throw;
  }
}

void Runtime::Start() {
  const Api& api = libraries_.api();
  uint32_t count = 0;
  Refuse(api.aclrtGetDeviceCount(&count), "aclrtGetDeviceCount");
  if (count == 0) throw BridgeError(Code::kNotFound, "no Ascend device is visible; look at ASCEND_RT_VISIBLE_DEVICES");
  if (options_.determinism >= 0) {
    Refuse(api.aclrtSetSysParamOpt(kOptionDeterministic, options_.determinism), "aclrtSetSysParamOpt");
  }
  version_ = ReadVersion();
  groups_ = std::make_unique<Groups>(libraries_);
  const std::string kind = libraries_.is_simulator() ? "Ascend simulator device " : "Ascend device ";
  for (uint32_t i = 0; i < count; ++i) {
    devices_.push_back(std::make_unique<Device>(api, i, options_.device, kind + std::to_string(i)));
    handles_.push_back(std::make_unique<HandleTable>(*devices_.back()));
  }
  Refuse(api.aclrtSetDevice(0), "aclrtSetDevice");
  const char* soc = api.aclrtGetSocName();
  soc_name_ = soc == nullptr ? "unknown" : soc;
}

Runtime::~Runtime() {
  groups_.reset();
  for (size_t i = 0; i < devices_.size(); ++i) {
    std::lock_guard<std::mutex> lock(devices_[i]->mutex);
    if (!devices_[i]->is_started()) continue;
    libraries_.api().aclrtSetDevice(devices_[i]->ordinal());
    handles_[i]->ReleaseAll();
    devices_[i]->Close();
    libraries_.api().aclrtResetDevice(devices_[i]->ordinal());  // ends what a fault has left there
  }
  libraries_.api().aclFinalize();
}

void Runtime::Refuse(int32_t status, const std::string& call) {
  const StatusClass meaning = Classify(status);
  if (meaning.code == Code::kOk) return;
  const char* message = libraries_.api().aclGetRecentErrMsg();
  throw BridgeError(meaning.code, call + " failed with status " + std::to_string(status) + ": " +
                                      (message == nullptr ? "(the library gives no text)" : message));
}

std::string Runtime::ReadVersion() {
  std::string package = "runtime";
  std::string text(kVersionTextBytes, '\0');
  if (libraries_.api().aclsysGetVersionStr(package.data(), text.data()) == 0) return text.c_str();
  const std::string found = VersionIn(options_.loader.home_dir + "/version.info");
  return found.empty() ? "unknown" : found;
}

Runtime& Runtime::Get() {
  if (TheRuntime() == nullptr) {
    throw BridgeError(Code::kFailedPrecondition, "the Ascend bridge is not open; call kernels.ascend.open_bridge()");
  }
  return *TheRuntime();
}

void Runtime::Open(const RuntimeOptions& options) {
  if (IsOpen()) {
    throw BridgeError(Code::kFailedPrecondition,
                      "the Ascend bridge is open already; its options hold for the process until it is closed");
  }
  TheRuntime() = std::make_unique<Runtime>(options);
}

bool Runtime::IsOpen() { return TheRuntime() != nullptr; }

void Runtime::Close() { TheRuntime().reset(); }

Device& Runtime::device(int32_t ordinal) {
  if (ordinal < 0 || ordinal >= num_devices()) {
    throw BridgeError(Code::kNotFound, "device " + std::to_string(ordinal) + " does not exist; there are " +
                                           std::to_string(num_devices()) +
                                           ", and JAX must have as many CPU devices "
                                           "(--xla_force_host_platform_device_count)");
  }
  return *devices_[ordinal];
}

HandleTable& Runtime::handles(int32_t ordinal) {
  device(ordinal);
  return *handles_[ordinal];
}

std::string Runtime::WhyNot(const std::string& name) {
  const OperatorInfo* info = FindOperator(name);
  if (info == nullptr) return "it is not in the bridge's operator table";
  if (!CoversVersion(*info, version_) && options_.loader.accept_version != version_) {
    return std::string("its argument list is known for CANN ") + info->first_version + " to " + info->last_version +
           " only; DEEPINFER_JAX_ASCEND_ACCEPT_VERSION=" + version_ + " accepts this version at your own risk";
  }
  for (const std::string& symbol : {name + "GetWorkspaceSize", name}) {
    const Symbol found = libraries_.Find(symbol);
    if (found.address == nullptr) return "no loaded library has " + symbol;
    if (info->origin == Origin::kCann && found.library.find(kCustomLibrary) != std::string::npos) {
      return symbol + " comes from the custom library " + found.library +
             ", whose operators may have other arguments under the same name; take it out of "
             "ASCEND_CUSTOM_OPP_PATH";
    }
  }
  return "";
}

ResolvedOperator Runtime::Resolve(const char* name) {
  const std::string reason = WhyNot(name);
  if (!reason.empty()) {
    throw BridgeError(Code::kUnimplemented, std::string(name) + " of CANN " + version_ + " cannot be used: " + reason);
  }
  return {libraries_.Find(std::string(name) + "GetWorkspaceSize").address, libraries_.Find(name).address};
}

}  // namespace deepinfer::ascend
