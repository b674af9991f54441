// A compiler of kernels for the driver on the host: compiler.py makes a library of a source, whose path is the program.
//
// HOST_COMPILER is the command that is given a folder with kernel.cu and options, and leaves binary there.

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

namespace {

const int kCompilation = 6;  // NVRTC_ERROR_COMPILATION

struct Program {
    std::string source, log, binary;
};

std::string content(const std::string& path) {
    std::stringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
}

int size_of(const std::string& text, std::size_t* size) { return *size = text.size() + 1, 0; }
int copy_of(const std::string& text, char* to) { return std::memcpy(to, text.c_str(), text.size() + 1), 0; }

}  // namespace

extern "C" {

const char* nvrtcGetErrorString(int error) { return error == kCompilation ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR"; }
int nvrtcVersion(int* major, int* minor) { return *major = HOST_CUDA / 1000, *minor = HOST_CUDA % 1000 / 10, 0; }
int nvrtcCreateProgram(Program** program, const char* source, const char*, int, const char**, const char**) {
    return *program = new Program{source, "", ""}, 0;
}
int nvrtcDestroyProgram(Program** program) { return delete *program, 0; }
int nvrtcCompileProgram(Program* program, int count, const char** options) {
    char made[] = "/tmp/host-kernel-XXXXXX";
    const std::string folder = mkdtemp(made);
    std::ofstream(folder + "/kernel.cu") << program->source;
    std::ofstream listed(folder + "/options");
    for (int k = 0; k < count; ++k) listed << options[k] << "\n";
    listed.close();
    const std::string command = std::string(std::getenv("HOST_COMPILER")) + " " + folder + " > " + folder + "/log 2>&1";
    const int status = std::system(command.c_str());
    program->log = content(folder + "/log");
    program->binary = content(folder + "/binary");
    std::system(("rm -r " + folder).c_str());
    return status == 0 ? 0 : kCompilation;
}
int nvrtcGetPTXSize(Program* program, std::size_t* size) { return size_of(program->binary, size); }
int nvrtcGetPTX(Program* program, char* to) { return copy_of(program->binary, to); }
int nvrtcGetCUBINSize(Program* program, std::size_t* size) { return size_of(program->binary, size); }
int nvrtcGetCUBIN(Program* program, char* to) { return copy_of(program->binary, to); }
int nvrtcGetProgramLogSize(Program* program, std::size_t* size) { return size_of(program->log, size); }
int nvrtcGetProgramLog(Program* program, char* to) { return copy_of(program->log, to); }

}  // extern "C"
